package layerfmt

import (
	"encoding/binary"
)

// heapHeadLen is what stands before a record of the heap: its checksum.
const heapHeadLen = 4

func appendHeapRecord(heap []byte, off uint32, record []byte) []byte {
	heap = binary.LittleEndian.AppendUint32(heap, checksum(tagHeap, off, record))
	return append(heap, record...)
}

// checkHeapRecord returns the record in b, which starts with its head.
func checkHeapRecord(b []byte, off uint32) ([]byte, bool) {
	if len(b) < heapHeadLen {
		return nil, false
	}
	record := b[heapHeadLen:]
	return record, binary.LittleEndian.Uint32(b) == checksum(tagHeap, off, record)
}
