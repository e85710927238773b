// Goroutines on several Ps, preemption of loops, timers, signals, faults, files
// and HTTP.
package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func locks() {
	var total, atomically int64
	var mutex sync.Mutex
	var group sync.WaitGroup
	for g := 0; g < 100; g++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for i := 0; i < 1000; i++ {
				mutex.Lock()
				total++
				mutex.Unlock()
				atomic.AddInt64(&atomically, 1)
				if i%100 == 0 {
					runtime.Gosched()
				}
			}
		}()
	}
	group.Wait()
	fmt.Println("counted", total, atomically)
	// A ring of goroutines that pass a token on.
	const ring = 100
	first := make(chan int)
	in := first
	for i := 0; i < ring; i++ {
		out := make(chan int)
		go func(in, out chan int) {
			for token := range in {
				out <- token + 1
			}
			close(out)
		}(in, out)
		in = out
	}
	sum := 0
	for round := 0; round < 20; round++ {
		first <- round
		sum += <-in
	}
	close(first)
	fmt.Println("ring", sum)
}

// spinning needs asynchronous preemption: the loops make no calls.
func spinning() {
	var stop int32
	for p := 0; p < 2*runtime.GOMAXPROCS(0); p++ {
		go func() {
			n := 0
			for atomic.LoadInt32(&stop) == 0 {
				n++
			}
		}()
	}
	done := make(chan bool)
	go func() {
		time.Sleep(20 * time.Millisecond)
		runtime.GC()
		done <- true
	}()
	fmt.Println("preempted", <-done)
	atomic.StoreInt32(&stop, 1)
}

func timers() {
	begin := time.Now()
	select {
	case <-time.After(20 * time.Millisecond):
	case <-time.After(time.Minute):
		fmt.Println("wrong timer")
	}
	fmt.Println("slept", time.Since(begin) >= 20*time.Millisecond)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	<-ctx.Done()
	fmt.Println(ctx.Err())
	ticker := time.NewTicker(2 * time.Millisecond)
	for i := 0; i < 5; i++ {
		<-ticker.C
	}
	ticker.Stop()
}

func signals() {
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGUSR1, syscall.SIGTERM)
	for _, s := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGTERM} {
		check(syscall.Kill(os.Getpid(), s))
		fmt.Println("caught", <-caught)
	}
}

func faults() {
	defer func() {
		err, ok := recover().(runtime.Error)
		fmt.Println(ok, err)
	}()
	old := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(old)
	var nothing *struct{ field int }
	fmt.Println(nothing.field)
}

func garbage() {
	var kept [][]byte
	for i := 0; i < 200_000; i++ {
		piece := make([]byte, i%1000)
		if i%1000 == 999 {
			kept = append(kept, piece)
		}
	}
	runtime.GC()
	debug.FreeOSMemory()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	fmt.Println("kept", len(kept), stats.NumGC > 2)
}

func files() {
	directory, err := os.MkdirTemp("", "go")
	check(err)
	defer os.RemoveAll(directory)
	for i := 0; i < 10; i++ {
		check(os.WriteFile(filepath.Join(directory, fmt.Sprint(i)), bytes.Repeat([]byte{byte(i)}, i*1000), 0o600))
	}
	total := int64(0)
	check(filepath.Walk(directory, func(path string, info os.FileInfo, err error) error {
		if err == nil && !info.IsDir() {
			total += info.Size()
		}
		return err
	}))
	_, err = os.Open(filepath.Join(directory, "none"))
	fmt.Println("files", total, errors.Is(err, os.ErrNotExist))
	var packed bytes.Buffer
	writer := gzip.NewWriter(&packed)
	_, err = writer.Write([]byte(strings.Repeat("thaw", 100_000)))
	check(err)
	check(writer.Close())
	reader, err := gzip.NewReader(&packed)
	check(err)
	unpacked, err := io.ReadAll(reader)
	check(err)
	fmt.Printf("%x\n", sha256.Sum256(unpacked))
}

func web() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		check(json.NewEncoder(w).Encode(map[string]any{"path": r.URL.Path, "bytes": len(body)}))
	})}
	go server.Serve(listener)
	answers := make([]string, 40)
	var group sync.WaitGroup
	for i := range answers {
		group.Add(1)
		go func(i int) {
			defer group.Done()
			url := fmt.Sprintf("http://%s/%02d", listener.Addr(), i)
			response, err := http.Post(url, "text/plain", strings.NewReader(strings.Repeat("x", i*1000)))
			check(err)
			body, err := io.ReadAll(response.Body)
			check(err)
			response.Body.Close()
			answers[i] = strings.TrimSpace(string(body))
		}(i)
	}
	group.Wait()
	sort.Strings(answers)
	fmt.Println(strings.Join(answers, "\n"))
	check(server.Shutdown(context.Background()))
	addresses, err := net.LookupHost("localhost")
	check(err)
	fmt.Println(len(addresses) > 0)
}

func main() {
	runtime.GOMAXPROCS(4)
	locks()
	spinning()
	timers()
	signals()
	faults()
	garbage()
	files()
	web()
}
