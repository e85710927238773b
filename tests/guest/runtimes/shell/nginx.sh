# nginx: one process alone, then a master with several workers.
set -eu
cd "$(mktemp -d)"
mkdir www; echo "hello from nginx" > www/index.html; seq 1 200000 > www/big; chmod -R a+rX .
[ "$(id -u)" = 0 ] && user='user root;' || user=''
# A port at which nobody listens, from a random one on: below those that the host gives to connections, which
# another test may have.
free_port() { port=$(($1 + RANDOM % 1400)); while (: < /dev/tcp/127.0.0.1/$port) 2>/dev/null; do port=$((port + 1)); done; }
free_port 12000; front=$port
free_port 13500; behind=$port
configure() {
    cat > nginx.conf <<END
$user
daemon $1; master_process $2; worker_processes $3; pid $PWD/pid; error_log $PWD/error.log;
events { worker_connections 64; }
http {
    access_log off; sendfile on; aio threads; gzip on; gzip_types text/plain;
    client_body_temp_path $PWD/t1; proxy_temp_path $PWD/t2; fastcgi_temp_path $PWD/t3;
    uwsgi_temp_path $PWD/t4; scgi_temp_path $PWD/t5;
    server { listen 127.0.0.1:$front; root $PWD/www; location /pass/ { proxy_pass http://127.0.0.1:$behind/; } }
    server { listen 127.0.0.1:$behind; return 200 "behind\n"; }
}
END
}
ask() { curl -sS --noproxy '*' "$@"; }
await() { for i in $(seq 200); do (: < /dev/tcp/127.0.0.1/$front) 2>/dev/null && return; sleep 0.05; done; }
configure off off 1
/usr/sbin/nginx -c "$PWD/nginx.conf" & server=$!
await
ask http://127.0.0.1:$front/
ask http://127.0.0.1:$front/big | sha256sum
ask -r 10-19 http://127.0.0.1:$front/big; echo
ask -o /dev/null -w '%{http_code}\n' http://127.0.0.1:$front/none
ask http://127.0.0.1:$front/pass/
kill -QUIT $server; wait $server; echo "ended $?"
configure on on 3
/usr/sbin/nginx -c "$PWD/nginx.conf"
await
for i in 1 2 3 4 5 6; do ask http://127.0.0.1:$front/; done
ask --compressed http://127.0.0.1:$front/big | sha256sum
/usr/sbin/nginx -c "$PWD/nginx.conf" -s reload 2>/dev/null; sleep 0.3
ask http://127.0.0.1:$front/pass/
/usr/sbin/nginx -c "$PWD/nginx.conf" -s quit 2>/dev/null
while [ -e pid ]; do sleep 0.05; done
grep -c emerg error.log || true
