// A server that answers every request with a greeting.
package main

import (
	"cmp"
	"fmt"
	"log"
	"net/http"
	"os"
)

// What is done before ListenAndServe is done once, when the function is built.
const greeting = "Hello from Go!"

func main() {
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		name := cmp.Or(r.URL.Query().Get("name"), "you")
		fmt.Fprintf(w, "%s Nice to meet %s.\n", greeting, name)
	})
	port := cmp.Or(os.Getenv("PORT"), "8080")
	log.Fatal(http.ListenAndServe(":"+port, nil))
}
