package gateway

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/catalog"
)

// TokenHash is the SHA-256 of a token: all of it that the daemon keeps.
type TokenHash [sha256.Size]byte

// HashToken returns the hash of a token as it is written in its file.
func HashToken(token string) TokenHash { return sha256.Sum256([]byte(token)) }

const tokenBytes = 32

// EnsureToken returns the hash of the token in file, which it makes with 256
// random bits and mode 0600 when it is missing. A file that others may read, or
// that holds anything else, is replaced.
func EnsureToken(file string) (TokenHash, error) {
	token, err := readToken(file)
	if err == nil {
		return HashToken(token), nil
	}
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errBadToken) {
		return TokenHash{}, fmt.Errorf("token: %w", err)
	}
	raw := make([]byte, tokenBytes)
	_, _ = rand.Read(raw) // never fails: it ends the process instead
	token = hex.EncodeToString(raw)
	if err := writeToken(file, token); err != nil {
		return TokenHash{}, fmt.Errorf("token: %w", err)
	}
	return HashToken(token), nil
}

var errBadToken = errors.New("not a token of ours, or open to others")

func readToken(file string) (string, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.ELOOP) {
		return "", errBadToken
	}
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return "", fmt.Errorf("stat %s: %w", file, err)
	}
	b := make([]byte, 2*tokenBytes+2)
	n, err := f.Read(b)
	if err != nil && n == 0 {
		return "", errBadToken
	}
	token := strings.TrimSuffix(string(b[:n]), "\n")
	raw, err := hex.DecodeString(token)
	if err != nil || len(raw) != tokenBytes || st.Mode&0o077 != 0 || int(st.Uid) != os.Geteuid() {
		return "", errBadToken
	}
	return token, nil
}

// writeToken puts the token in place in one step, so that no client ever reads
// half of one.
func writeToken(file, token string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(file), ".token-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.WriteString(token + "\n")
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), file)
}

// Peer is the process at the other end of a connection, as the kernel saw it
// when it connected.
type Peer struct {
	UID uint32
	PID int32
}

func kernelPeer(c net.Conn) (Peer, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return Peer{}, fmt.Errorf("%T tells no credentials", c)
	}
	rc, err := u.SyscallConn()
	if err != nil {
		return Peer{}, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := rc.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return Peer{}, err
	}
	if credErr != nil {
		return Peer{}, fmt.Errorf("read peer credentials: %w", credErr)
	}
	return Peer{UID: cred.Uid, PID: cred.Pid}, nil
}

// admit says why the process at the other end of c may not speak, nil when it
// may.
func (g *Gateway) admit(c net.Conn) error {
	p, err := g.o.Peer(c)
	if err != nil {
		return catalog.Errorf(catalog.Unauthorized, "the gateway cannot tell who is calling: %w", err)
	}
	if own := uint32(os.Geteuid()); p.UID != own && p.UID != 0 {
		return catalog.Errorf(catalog.Unauthorized, "process %d belongs to user %d: only user %d, who runs the daemon, and root may call it", p.PID, p.UID, own)
	}
	return nil
}

func (g *Gateway) peerError(r *http.Request) error {
	err, _ := r.Context().Value(peerKey{}).(error)
	return err
}

// authority returns what the request's token allows.
func (g *Gateway) authority(r *http.Request) (catalog.Authority, error) {
	if err := g.peerError(r); err != nil {
		return "", err
	}
	const remedy = "send the content of the state directory's token file as \"Authorization: Bearer ...\", or check that --state-dir names the daemon's own"
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		return "", catalog.Errorf(catalog.Unauthorized, "the request bears no token: %s", remedy)
	}
	hash := HashToken(token)
	var found catalog.Authority
	for _, grant := range g.o.Grants { // all of them, whichever matches
		if subtle.ConstantTimeCompare(hash[:], grant.Token[:]) == 1 {
			found = grant.Authority
		}
	}
	if found == "" {
		return "", catalog.Errorf(catalog.Unauthorized, "the request's token is not this daemon's: %s", remedy)
	}
	return found, nil
}
