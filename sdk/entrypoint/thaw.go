// Package thaw asks Thaw to freeze this program, and tells which copy of it this is.
//
//	thaw.BeforeFreeze(connections.Close) // what no two copies may share
//	thaw.AfterThaw(func(generation uint64) { connections.Open() })
//	loadEverything()
//	generation, err := thaw.Freeze() // copies begin here
//
// One file without dependencies: copy it into a package of your module. It talks to
// /dev/thaw, which every sandbox has. Outside a sandbox, Freeze does nothing and
// returns 0, so that the same program runs anywhere.
package thaw

import (
	cryptorand "crypto/rand"
	"encoding/binary"
	"errors"
	"io/fs"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"sync"
)

const device = "/dev/thaw"

var (
	lock   sync.Mutex
	before []func()
	after  []func(generation uint64)
	// The generation of the last Reseed, and whether there was one.
	seeded    uint64
	hasSeeded bool
)

// BeforeFreeze calls hook before a freeze; the last one given is called first.
func BeforeFreeze(hook func()) {
	lock.Lock()
	defer lock.Unlock()
	before = append(before, hook)
}

// AfterThaw calls hook when Freeze goes on, in the order given: in every copy, and
// in the original too if it was not ended.
func AfterThaw(hook func(generation uint64)) {
	lock.Lock()
	defer lock.Unlock()
	after = append(after, hook)
}

// Generation says which copy this is: 0 for the original, n for a copy of the n-th
// generation. A copy of a copy that was frozen again is of the next generation.
func Generation() (uint64, error) {
	text, err := os.ReadFile(device)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
}

// Freeze freezes the program here, if somebody wants that, and returns Generation.
//
// It comes back at once if nobody does (thaw run), or if this is a copy already. All
// goroutines must come to wait for something; the function says freeze = "program"
// in [entry] of its thaw.toml if it waits for clients earlier.
func Freeze() (uint64, error) {
	file, err := os.OpenFile(device, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer file.Close()
	lock.Lock()
	first, then := before, after
	lock.Unlock()
	for i := len(first) - 1; i >= 0; i-- {
		first[i]()
	}
	if _, err := file.WriteString("freeze"); err != nil {
		return 0, err
	}
	which, err := Generation()
	if err != nil {
		return 0, err
	}
	for _, hook := range then {
		hook(which)
	}
	return which, nil
}

// Reseed seeds what math/rand draws from, where Go lets it, if this is another copy than at
// the last call. It returns whether it is.
//
// Call it where a request begins, in a program that is frozen when it first waits for
// clients: until then all copies draw the same numbers. Go 1.24 and later seed math/rand
// only in programs whose go.mod names an older Go, or with //go:debug randseednop=0 in
// package main; nothing seeds the functions of math/rand/v2. Draw from Source instead, and
// make generators of your own anew where Reseed returns true.
func Reseed() (bool, error) {
	which, err := Generation()
	if err != nil {
		return false, err
	}
	lock.Lock()
	defer lock.Unlock()
	if hasSeeded && which == seeded {
		return false, nil
	}
	seeded, hasSeeded = which, true
	rand.Seed(Source{}.Int63())
	return true, nil
}

// Source is a source for generators of math/rand and math/rand/v2, rand.New(thaw.Source{}),
// that draws from crypto/rand. No two copies draw the same, and several goroutines may use it.
type Source struct{}

// Uint64 returns a random number.
func (Source) Uint64() uint64 {
	var bytes [8]byte
	if _, err := cryptorand.Read(bytes[:]); err != nil {
		panic(err) // The system has no random numbers.
	}
	return binary.LittleEndian.Uint64(bytes[:])
}

// Int63 returns a random number that is not negative.
func (s Source) Int63() int64 {
	return int64(s.Uint64() >> 1)
}

// Seed does nothing, since there is no state.
func (Source) Seed(int64) {}
