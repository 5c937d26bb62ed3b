package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/layerfmt"
)

func (s *sandboxd) checkCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check",
		Short: "verify every byte of every sandbox's layers",
		Long: "Verify every byte of every sandbox's layers, through the daemon where one runs,\n" +
			"else by reading the state directory.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := s.config()
			if err != nil {
				return err
			}
			found, err := s.check(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			ok := true
			w := &strings.Builder{}
			for _, c := range found {
				ok = ok && c.OK
				fmt.Fprintf(w, "%s ", c.SandboxID)
				renderVerify(w, &c.VerifyState)
			}
			if len(found) == 0 {
				fmt.Fprintln(w, "no sandboxes")
			}
			if s.json {
				err = writeJSON(s.app.Stdout, map[string]any{"ok": ok, "sandboxes": append([]Checked{}, found...)})
			} else {
				_, err = fmt.Fprint(s.app.Stdout, w)
			}
			if err == nil && !ok {
				err = exitError(catalog.ExitFailed)
			}
			return err
		},
	}
}

func (s *sandboxd) check(ctx context.Context, cfg config.Config) ([]Checked, error) {
	_, held, err := cfg.Holders()
	if err != nil {
		return nil, err
	}
	if held {
		return checkOnline(ctx, cfg)
	}
	if _, err := os.Stat(cfg.StateDir); isMissing(err) {
		return nil, nil
	}
	if s.daemon.Check == nil {
		return nil, catalog.Errorf(catalog.Unavailable, "no daemon is running for state directory %s, and a check needs one: start it with \"sandboxd start --state-dir %s\"", cfg.StateDir, client.Quote(cfg.StateDir))
	}
	l, err := takeLock(ctx, cfg, 0) // nobody may write while we read
	if err != nil {
		return nil, err
	}
	found, err := s.daemon.Check(ctx, cfg)
	return found, errors.Join(err, l.Close())
}

func checkOnline(ctx context.Context, cfg config.Config) ([]Checked, error) {
	c := client.New(cfg.StateDir)
	defer c.Close()
	var list catalog.ListSandboxesResult
	if err := c.Call(ctx, client.Call{Op: catalog.ListSandboxes}, &list, nil); err != nil {
		return nil, err
	}
	var found []Checked
	for _, b := range list.Sandboxes {
		var layers catalog.LayerStackResult
		err := c.Call(ctx, client.Call{Op: catalog.LayerStack, SandboxID: b.SandboxID, Request: &catalog.LayerStackRequest{Verify: true}}, &layers, nil)
		v := Checked{SandboxID: b.SandboxID}
		switch {
		case err != nil && catalog.AsError(err).Kind != catalog.Corrupt:
			return nil, err
		case err != nil:
			v.Problems = []string{err.Error()}
		case layers.Verify != nil:
			v.VerifyState = *layers.Verify
		}
		found = append(found, v)
	}
	return found, nil
}

func (s *sandboxd) layerCommand() *cobra.Command {
	layer := &cobra.Command{Use: "layer", Short: "look into layer files"}
	var verify bool
	dump := &cobra.Command{
		Use:   "dump FILE [--verify]",
		Short: "print what a layer file holds, without a daemon",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef(cmd, "give one layer file")
			}
			return nil
		},
		DisableFlagsInUseLine: true,
		Annotations:           map[string]string{"exit": daemonExitCodes},
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := dumpLayer(cmd.Context(), args[0], verify)
			if err != nil {
				return err
			}
			if s.json {
				return writeJSON(s.app.Stdout, d)
			}
			_, err = fmt.Fprint(s.app.Stdout, d)
			return err
		},
	}
	dump.Flags().BoolVar(&verify, "verify", false, "also check every byte")
	layer.AddCommand(dump)
	return layer
}

// layerDump is what "sandboxd layer dump" tells.
type layerDump struct {
	File     string        `json:"file"`
	ID       string        `json:"id"`
	Info     layerfmt.Info `json:"info"`
	Sections []string      `json:"sections"`
	Verified bool          `json:"verified"`
	Dirents  []layerDirent `json:"dirents"`
	Inodes   []layerInode  `json:"inodes"`
}

type layerDirent struct {
	Dir  uint64       `json:"dir"`
	Op   string       `json:"op"` // put, whiteout, opaque
	Name catalog.Text `json:"name"`
	Ino  uint64       `json:"ino"`
	Kind string       `json:"kind"`
}

type layerInode struct {
	Ino     uint64       `json:"ino"`
	Kind    string       `json:"kind"`
	Mode    string       `json:"mode"`
	UID     uint32       `json:"uid"`
	GID     uint32       `json:"gid"`
	Nlink   uint32       `json:"nlink"`
	Size    uint64       `json:"size"`
	Content string       `json:"content"`
	Hash    string       `json:"hash,omitempty"`
	Target  catalog.Text `json:"target,omitempty"`
}

func dumpLayer(ctx context.Context, file string, verify bool) (d layerDump, err error) {
	f, err := os.Open(file)
	if err != nil {
		return d, catalog.Errorf(catalog.NotFound, "layer file: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	st, err := f.Stat()
	if err != nil {
		return d, fmt.Errorf("layer file: %w", err)
	}
	if !st.Mode().IsRegular() {
		return d, catalog.Errorf(catalog.InvalidRequest, "%s is no regular file: give a layer file", file)
	}
	r, err := layerfmt.Open(f, st.Size(), layerfmt.ReaderOptions{Name: filepath.Base(file), Cache: layerfmt.NewFrameCache(64 << 20)})
	if err != nil {
		return d, layerError(err)
	}
	if verify {
		if err := r.Verify(ctx); err != nil {
			return d, layerError(err)
		}
	}
	d = layerDump{File: file, ID: r.ID().String(), Info: r.Info(), Sections: r.Sections(), Verified: verify}
	err = r.AllDirents(func(e layerfmt.Dirent) bool {
		d.Dirents = append(d.Dirents, layerDirent{uint64(e.Dir), e.Op.String(), catalog.Text(e.Name), uint64(e.Ino), e.Kind.String()})
		return true
	})
	if err != nil {
		return d, layerError(err)
	}
	err = r.AllInodes(func(n layerfmt.Inode) bool {
		i := layerInode{
			Ino: uint64(n.Ino), Kind: n.Kind.String(), Mode: fmt.Sprintf("%04o", n.Mode), UID: n.UID, GID: n.GID,
			Nlink: n.Nlink, Size: n.Size, Content: n.Content.String(), Target: catalog.Text(n.Link),
		}
		if n.Content != layerfmt.None {
			i.Hash = fmt.Sprintf("%x", n.Hash)
		}
		d.Inodes = append(d.Inodes, i)
		return true
	})
	if err != nil {
		return d, layerError(err)
	}
	catalog.FillEmpty(&d)
	return d, nil
}

func layerError(err error) error {
	if layerfmt.IsCorrupt(err) {
		return catalog.Errorf(catalog.Corrupt, "%w", err)
	}
	return err
}

func (d layerDump) String() string {
	w := &strings.Builder{}
	fmt.Fprintf(w, "layer %s\n%s, %s, %s, %s content, %s stored\n", d.ID,
		count(int64(d.Info.Dirents), "name"), count(int64(d.Info.Whiteouts), "whiteout"), count(int64(d.Info.Inodes), "inode"),
		bytesText(d.Info.LogicalBytes), bytesText(d.Info.StoredBytes))
	if len(d.Sections) > 0 {
		fmt.Fprintf(w, "sections: %s\n", strings.Join(d.Sections, ", "))
	}
	if d.Verified {
		w.WriteString("every byte verified\n")
	}
	w.WriteByte('\n')
	table(w, "DIR\tOP\tINO\tKIND\tNAME", func(row func(...any)) {
		for _, e := range d.Dirents {
			row(e.Dir, e.Op, e.Ino, e.Kind, printable(e.Name))
		}
	})
	w.WriteByte('\n')
	table(w, "INO\tKIND\tMODE\tOWNER\tLINKS\tSIZE\tCONTENT\tHASH", func(row func(...any)) {
		for _, i := range d.Inodes {
			content := i.Content
			if i.Target != "" {
				content = "-> " + printable(i.Target)
			}
			row(i.Ino, i.Kind, i.Mode, fmt.Sprintf("%d:%d", i.UID, i.GID), i.Nlink, i.Size, content, dash(i.Hash))
		}
	})
	return w.String()
}
