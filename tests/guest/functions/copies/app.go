// Shows what must differ between copies of one image, and what must not.
package main

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"math/big"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

// Counted by goroutines that are asleep when the program is frozen.
var sleeps, ticks atomic.Int64

func read(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	return strings.TrimSpace(string(text))
}

func identity() map[string]any {
	bytes := make([]byte, 16)
	if _, err := rand.Read(bytes); err != nil {
		panic(err)
	}
	number, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 128))
	if err != nil {
		panic(err)
	}
	hostname, err := os.Hostname()
	if err != nil {
		panic(err)
	}
	slept, ticked := sleeps.Load(), ticks.Load()
	time.Sleep(100 * time.Millisecond)
	return map[string]any{
		"unique": map[string]string{
			"bytes":   hex.EncodeToString(bytes),
			"number":  number.String(),
			"boot_id": read("/proc/sys/kernel/random/boot_id"),
		},
		"hostname": hostname,
		"pid":      os.Getpid(),
		"time":     float64(time.Now().UnixMilli()) / 1000,
		"ticked":   min(sleeps.Load()-slept, ticks.Load()-ticked),
		"greeting": os.Getenv("GREETING"),
		"limit":    read("/sys/fs/cgroup/memory.max"),
	}
}

func main() {
	go func() {
		for {
			time.Sleep(10 * time.Millisecond)
			sleeps.Add(1)
		}
	}()
	go func() {
		for range time.Tick(10 * time.Millisecond) {
			ticks.Add(1)
		}
	}()
	http.HandleFunc("/", func(response http.ResponseWriter, _ *http.Request) {
		if err := json.NewEncoder(response).Encode(identity()); err != nil {
			panic(err)
		}
	})
	panic(http.ListenAndServe(":8080", nil))
}
