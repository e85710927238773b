// Floating point, containers and strings, without a system call in between.
package main

import (
	"fmt"
	"math"
	"strconv"
	"time"
)

func work(n int) float64 {
	total, words := 0.0, map[string]int{}
	for i := 0; i < n; i++ {
		total += math.Sqrt(float64(i * i % 7))
		words[strconv.Itoa(i%1000)]++
	}
	return total + float64(len(words))
}

func main() {
	work(1_000_000)
	begin := time.Now()
	sum := work(10_000_000)
	spent := time.Since(begin)
	if !(sum > 0) {
		panic("no sum")
	}
	fmt.Println(float64(spent.Microseconds()) / 1e3)
}
