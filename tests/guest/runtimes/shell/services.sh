# Daemons as they come: memcached, HAProxy before a Python server, sshd with its
# clients.
set -eu
cd "$(mktemp -d)"
chmod 755 .

memcached -l 127.0.0.1 -p 18211 -t 2 -u nobody & memcached=$!
for i in $(seq 50); do { exec 3<>/dev/tcp/127.0.0.1/18211; } 2>/dev/null && break; sleep 0.1; done
printf 'set k 0 0 5\r\nhello\r\nget k\r\nincr k 1\r\nquit\r\n' >&3; cat <&3
kill $memcached; wait $memcached || true

mkdir www; echo "behind HAProxy" > www/index.html
(cd www; exec python3 -m http.server 18999 --bind 127.0.0.1 >/dev/null 2>&1) & server=$!
cat > haproxy.cfg <<END
global
    nbthread 2
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
frontend front
    bind 127.0.0.1:18998
    default_backend back
backend back
    retries 20
    server only 127.0.0.1:18999
END
haproxy -f haproxy.cfg -D -p pid 2>/dev/null
for i in 1 2 3; do curl -sS --noproxy '*' --retry 20 --retry-all-errors --retry-delay 1 http://127.0.0.1:18998/; done
kill $(cat pid) $server; wait $server || true

[ "$(id -u)" = 0 ] || exit 0
ssh-keygen -q -t ed25519 -N '' -f host; ssh-keygen -q -t ed25519 -N '' -f client
mkdir -p /run/sshd
# Below another shell (SHLVL), bash does not read what root has in .bashrc, which several at once may stumble over.
"$(command -v sshd || echo /usr/sbin/sshd)" -p 18022 -h "$PWD/host" -E "$PWD/log" -o ListenAddress=127.0.0.1 \
    -o PidFile="$PWD/sshd.pid" -o AuthorizedKeysFile="$PWD/client.pub" -o StrictModes=no \
    -o UsePAM=no -o PermitRootLogin=yes -o SetEnv=SHLVL=1
options="-q -i client -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectionAttempts=20"
ssh -p 18022 $options root@127.0.0.1 'echo "over ssh $((6 * 7))"; id -u; exit 3' </dev/null || echo "exit $?"
ssh -tt -p 18022 $options root@127.0.0.1 'test -t 0 && stty size >/dev/null && echo a terminal' </dev/null | tr -d '\r'
seq 100000 > data; scp -P 18022 $options data "root@127.0.0.1:$PWD/copy"; cmp data copy && echo copied
for i in 1 2 3 4; do ssh -p 18022 $options root@127.0.0.1 cat <data | sha256sum & done; wait
kill "$(cat sshd.pid)"
