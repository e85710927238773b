# Everyday tools: archives, text, busybox.
set -eu
cd "$(mktemp -d)"
mkdir -p tree/a/b; seq 1 5000 > tree/numbers; echo hello > tree/a/hello; ln -s ../numbers tree/a/link
chmod 640 tree/a/hello; touch -d '2020-02-02 02:02:02 UTC' tree/a/hello tree/numbers
tar --owner=0 --group=0 -cf all.tar tree; tar tf all.tar | sort
mkdir out; tar xf all.tar -C out; diff -r tree out/tree && stat -c '%a %Y %s' out/tree/a/hello; readlink out/tree/a/link
tar czf all.tar.gz tree; gzip -t all.tar.gz && tar tzf all.tar.gz | wc -l
tar cJf all.tar.xz tree 2>/dev/null && tar tJf all.tar.xz | wc -l
gzip -9c tree/numbers | gunzip | sha256sum
awk '$1 % 1000 == 0 { print $1, $1 / 3 }' tree/numbers
sed -n '/^99/p' tree/numbers | tail -n 1
cp -a tree copy; rm -rf tree; mv copy tree; ls -R tree | head -n 5
dd if=/dev/zero of=zeros bs=64k count=10 2>/dev/null; cmp zeros <(head -c 655360 /dev/zero) && du -b zeros | cut -f1
busybox sh -c 'for i in 1 2 3; do echo $i; done | busybox sort -r | busybox tr "\n" " "; echo'
busybox seq 1 10 | busybox awk '{ s += $1 } END { print s }'
busybox find tree -type f | busybox sort
echo text | busybox gzip | busybox zcat | busybox md5sum
printf 'all: out\nout:\n\t@echo made by $(SHELL); echo 1 > out\n' > Makefile; make; make
