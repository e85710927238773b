// A web server made of nothing but Go's own library.
package main

import (
	"fmt"
	"log"
	"net/http"
	"os"
	"runtime"
	"sync/atomic"
)

var requests atomic.Int64

func greet(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("name")
	if name == "" {
		name = "you"
	}
	fmt.Fprintf(w, "Hello from Go! Nice to meet %s, request %d.\n", name, requests.Add(1))
}

// sum keeps every P busy: each goroutine adds up its part of the numbers to n.
func sum(w http.ResponseWriter, r *http.Request) {
	const n = 20_000_000
	parts := 4 * runtime.GOMAXPROCS(0)
	sums := make(chan uint64)
	for part := 0; part < parts; part++ {
		go func(first int) {
			var sum uint64
			for i := first; i < n; i += parts {
				sum += uint64(i)
			}
			sums <- sum
		}(part)
	}
	var total uint64
	for part := 0; part < parts; part++ {
		total += <-sums
	}
	fmt.Fprintln(w, total)
}

func main() {
	port := os.Getenv("PORT")
	if port == "" {
		port = "8080"
	}
	http.HandleFunc("/", greet)
	http.HandleFunc("/sum", sum)
	log.Fatal(http.ListenAndServe("0.0.0.0:"+port, nil))
}
