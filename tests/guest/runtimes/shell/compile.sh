# gcc: compiles, links and runs programs.
set -eu
cd "$(mktemp -d)"
cat > part.c <<'END'
#include <math.h>
double root(double x) { return sqrt(x); }
END
cat > main.c <<'END'
#include <stdio.h>
double root(double x);
int main(int argc, char **argv) { printf("%d %s %.3f\n", argc, argv[1], root(2)); return 5; }
END
gcc -O2 -Wall -c part.c main.c; gcc -o program main.o part.o -lm; ./program argument || echo "exit $?"
gcc -static -o static main.c part.c -lm; ./static x || echo "exit $?"
gcc -shared -fPIC -o libpart.so part.c -lm; gcc -o dynamic main.c -L. -lpart -Wl,-rpath,"$PWD"; ./dynamic y || echo "exit $?"
ar rc libpart.a part.o; nm libpart.a | grep root; size program | wc -l
echo 'int main(void) { return x; }' > wrong.c; gcc -c wrong.c 2>&1 | grep -c error
if command -v g++ >/dev/null; then
    cat > main.cc <<'END'
#include <algorithm>
#include <iostream>
#include <stdexcept>
#include <thread>
#include <vector>
int main() {
    std::vector<int> v{3, 1, 2}; std::sort(v.begin(), v.end());
    try { throw std::runtime_error("thrown"); } catch (const std::exception &e) { std::cout << e.what() << v[0] << "\n"; }
    int n = 0; std::thread t([&] { n = 42; }); t.join(); std::cout << n << "\n";
}
END
    g++ -O1 -o cc main.cc -pthread; ./cc
fi
