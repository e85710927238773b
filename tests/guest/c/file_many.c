/* Reads all files of a directory whose names and contents are numbers, twice.
 * There may be more of them than anybody can have open at once. */
#include "guest.h"
#include <dirent.h>

static void add_up(void)
{
    long files = 0, sum = 0;
    DIR *directory = opendir(".");
    struct dirent *entry;
    while ((entry = readdir(directory))) {
        char text[32] = "";
        if (entry->d_name[0] < '0' || entry->d_name[0] > '9')
            continue;
        int fd = (int)MUST(open(entry->d_name, O_RDONLY));
        MUST(read(fd, text, sizeof text - 1));
        MUST(close(fd));
        files++;
        sum += atol(text);
    }
    closedir(directory);
    say("%ld files, together %ld\n", files, sum);
}

int main(int count, char **arguments)
{
    if (count > 1)
        MUST(chdir(arguments[1]));
    add_up();
    add_up();
    return 0;
}
