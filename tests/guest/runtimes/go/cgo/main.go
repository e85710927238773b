// C and Go in one program: calls in both directions, from several threads.
package main

/*
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

extern int fromC(int);

static int call_back(int n) { return fromC(n) + 1; }

static void *in_thread(void *argument) {
    int *n = argument;
    *n = fromC(*n);
    return NULL;
}

static int from_a_thread(int n) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, in_thread, &n) != 0) return -1;
    pthread_join(thread, NULL);
    return n;
}
*/
import "C"

import (
	"fmt"
	"net"
	"os/user"
	"sync"
	"unsafe"
)

//export fromC
func fromC(n C.int) C.int { return n * 2 }

func main() {
	text := C.CString("from C")
	defer C.free(unsafe.Pointer(text))
	fmt.Println(C.GoString(text), C.strlen(text))
	fmt.Println(C.call_back(20), C.from_a_thread(21))
	var group sync.WaitGroup
	var mutex sync.Mutex
	total := 0
	for i := 0; i < 50; i++ {
		group.Add(1)
		go func(i int) {
			defer group.Done()
			n := int(C.call_back(C.int(i))) + int(C.from_a_thread(C.int(i)))
			mutex.Lock()
			total += n
			mutex.Unlock()
		}(i)
	}
	group.Wait()
	fmt.Println(total)
	// With cgo these ask the C library.
	root, err := user.LookupId("0")
	fmt.Println(root.Username, err)
	addresses, err := net.LookupHost("localhost")
	fmt.Println(len(addresses) > 0, err)
}
