# redis-server with redis-cli and redis-benchmark; saves in a child process.
set -eu
cd "$(mktemp -d)"
redis-server --port 16379 --bind 127.0.0.1 --dir "$PWD" --save '' --appendonly no --daemonize no --enable-debug-command local > log 2>&1 & server=$!
ask() { redis-cli -p 16379 "$@"; }
for i in $(seq 100); do ask ping >/dev/null 2>&1 && break; sleep 0.1; done
ask set greeting hello; ask get greeting; ask incrby n 41; ask incr n
for i in 1 2 3; do ask rpush list $i; done; ask lrange list 0 -1
ask hset hash a 1 b 2; ask hgetall hash; ask zadd sorted 2 two 1 one; ask zrange sorted 0 -1
ask eval 'return redis.call("get", KEYS[1]) .. "!"' 1 greeting
ask set short lived px 30; sleep 0.1; ask get short
printf 'SET k%s v\n' $(seq 1 500) | ask --pipe | tail -n 1; ask dbsize
redis-benchmark -p 16379 -n 2000 -c 10 -q -t set,get,lpush 2>/dev/null | tr '\r' '\n' | grep -c 'requests per second'
ask bgsave; for i in $(seq 100); do [ -s dump.rdb ] && break; sleep 0.05; done; head -c 5 dump.rdb; echo
ask config set appendonly yes; sleep 0.3; ask set after append; ask debug reload
ask get after
ask shutdown nosave || true; wait $server; echo "ended $?"
