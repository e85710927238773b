package main

import (
	"fmt"
	"log"
	"net/http"
	"strings"

	"app/thaw"
)

func main() {
	var events []string
	thaw.BeforeFreeze(func() { events = append(events, "closed last") })
	thaw.BeforeFreeze(func() { events = append(events, "closed first") })
	thaw.AfterThaw(func(generation uint64) {
		events = append(events, fmt.Sprintf("opened in %d", generation))
	})
	thaw.AfterThaw(func(uint64) { events = append(events, "opened last") })
	which, err := thaw.Freeze()
	if err != nil {
		log.Fatal(err)
	}
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "copy %d: %s\n", which, strings.Join(events, ", "))
	})
	log.Fatal(http.ListenAndServe(":8080", nil))
}
