/* A process of a sandbox that breaks the kernel beneath it, which it can: they share
 * an address space. Its parent has ended, and other processes end at the same time.
 * The sandbox must end with it, although nobody waits for that process.
 *
 * It runs only in a sandbox. */
#include "../c/guest.h"
#include <sys/wait.h>

#define KERNEL_BASE 0x7e0000000000UL

/* A fault in the kernel's text, on what looks like one of its stacks. */
static void break_the_kernel(void)
{
    __asm__ volatile("mov %0, %%rsp\n"
                     "jmp *%1"
                     :
                     : "r"(-64L), "r"(KERNEL_BASE)
                     : "memory");
}

int main(void)
{
    /* Outside a sandbox nothing is mapped there, and this ends the program. */
    (void)*(volatile char *)KERNEL_BASE;
    for (int i = 0; i < 4; i++) {
        pid_t child = fork();
        if (!child) {
            if (fork() == 0) {
                usleep(20000);
                if (i == 2)
                    break_the_kernel();
            }
            _exit(0);
        }
        waitpid(child, NULL, 0);
    }
    say("waiting\n");
    for (;;)
        pause();
}
