// Child processes: their streams and their ends.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

func main() {
	out, err := exec.Command("echo", "from Go").Output()
	fmt.Printf("%q %v\n", out, err)
	out, err = exec.Command("sh", "-c", "echo out; echo err >&2; exit 5").CombinedOutput()
	fmt.Printf("%q %v\n", out, err)
	command := exec.Command("sort", "-r")
	command.Stdin = strings.NewReader("a\nc\nb\n")
	command.Env = []string{"LC_ALL=C", "PATH=/bin"}
	command.Dir = "/tmp"
	out, err = command.Output()
	fmt.Printf("%q %v\n", out, err)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err = exec.CommandContext(ctx, "sleep", "30").Run()
	var exit *exec.ExitError
	fmt.Println(errors.As(err, &exit), exit.Sys().(syscall.WaitStatus).Signal(), ctx.Err())
	fmt.Println(exec.Command("/no/such/program").Run())
	_, err = exec.LookPath("no-such-program")
	fmt.Println(err)

	// Many at once, each with more than a pipe holds.
	done := make(chan int)
	data := bytes.Repeat([]byte("0123456789"), 30_000)
	for i := 0; i < 5; i++ {
		go func() {
			cat := exec.Command("cat")
			cat.Stdin = bytes.NewReader(data)
			out, err := cat.Output()
			if err != nil || !bytes.Equal(out, data) {
				fmt.Println("lost something", len(out), err)
			}
			done <- len(out)
		}()
	}
	total := 0
	for i := 0; i < 5; i++ {
		total += <-done
	}
	fmt.Println(total)

	reader, writer, err := os.Pipe()
	fmt.Println(err)
	process, err := os.StartProcess("/bin/sh", []string{"sh", "-c", "echo $0 >&3"}, &os.ProcAttr{
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, writer},
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
	fmt.Println(err)
	writer.Close()
	out, _ = io.ReadAll(reader)
	state, err := process.Wait()
	fmt.Printf("%q %v %v\n", out, state, err)
}
