/* Memory policies on a machine with one node. */
#include "guest.h"
#include <linux/mempolicy.h>
#include <sys/mman.h>

static long get(int *mode, unsigned long *mask, unsigned long bits, void *at, unsigned long flags)
{
    return syscall(SYS_get_mempolicy, mode, mask, bits, at, flags);
}

static long set(int mode, unsigned long *mask, unsigned long bits)
{
    return syscall(SYS_set_mempolicy, mode, mask, bits);
}

static void show(void)
{
    int mode = -1;
    unsigned long mask[16] = {0};
    MUST(get(&mode, mask, 1024, NULL, 0));
    say("mode %x, nodes %lx\n", mode, mask[0]);
}

static void policies(void)
{
    PART("policies");
    show();
    unsigned long node = 1, other = 1UL << 40, none = 0, mask[16] = {0};
    int mode;
    TRY(set(MPOL_BIND, &node, 64));
    show();
    TRY(set(MPOL_INTERLEAVE, &node, 64));
    TRY(get(&mode, NULL, 0, NULL, MPOL_F_NODE));
    say("next %d\n", mode);
    TRY(set(MPOL_PREFERRED, NULL, 0));
    show();
    TRY(set(MPOL_BIND, &none, 64));
    TRY(set(MPOL_BIND, &other, 64));
    TRY(set(MPOL_BIND, NULL, 0));
    TRY(set(MPOL_DEFAULT, &node, 64));
    TRY(set(77, &node, 64));
    TRY(set(MPOL_BIND, &node, 1UL << 40));
    TRY(set(MPOL_BIND, (void *)8, 64));
    TRY(set(MPOL_DEFAULT, NULL, 0));
    TRY(get(NULL, mask, 1024, NULL, MPOL_F_MEMS_ALLOWED));
    say("allowed %lx\n", mask[0]);
    TRY(get(&mode, NULL, 0, NULL, MPOL_F_NODE));
    TRY(get(&mode, NULL, 0, &mode, 0));
    TRY(get(&mode, NULL, 0, &mode, MPOL_F_ADDR));
    TRY(get(&mode, NULL, 0, &mode, MPOL_F_ADDR | MPOL_F_NODE));
    say("node %d\n", mode);
    TRY(get(&mode, NULL, 0, (void *)8, MPOL_F_ADDR));
    TRY(get(&mode, NULL, 0, NULL, 64));
    void *area = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TRY(syscall(SYS_mbind, area, 8192, MPOL_BIND, &node, 64, 0));
    TRY(syscall(SYS_mbind, area, 8192, MPOL_BIND, &none, 64, 0));
    TRY(syscall(SYS_mbind, (char *)area + 1, 4096, MPOL_BIND, &node, 64, 0));
    TRY(syscall(SYS_mbind, area, 0, MPOL_BIND, &node, 64, 0));
    TRY(syscall(SYS_mbind, area, 8192, MPOL_BIND, &node, 64, 128));
    munmap(area, 8192);
    TRY(syscall(SYS_mbind, area, 8192, MPOL_BIND, &node, 64, 0));
}

int main(void)
{
    policies();
    return 0;
}
