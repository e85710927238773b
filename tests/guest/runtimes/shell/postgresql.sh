# PostgreSQL: a cluster made anew, clients over TCP and a Unix socket, parallel
# workers, pgbench, a dump, a crash that it recovers from.
set -eu
export LC_ALL=C.UTF-8
PATH=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1):$PATH
cd "$(mktemp -d)"
# It refuses to be the superuser.
as=
if [ "$(id -u)" = 0 ]; then
    as="setpriv --reuid=postgres --regid=postgres --clear-groups"
    chown postgres .
fi
start() { $as pg_ctl -D data -l log -w -o "-p 15432 -k $PWD -c listen_addresses=127.0.0.1" start >/dev/null || cat log; }
# A dot for each tenth of a second that it waits.
stop() { $as pg_ctl -D data -w -m "$1" stop | sed 's/\.\.*/./'; }
tcp() { $as psql -h 127.0.0.1 -p 15432 -Atc "$1" postgres; }
local_() { $as psql -h "$PWD" -p 15432 -Atc "$1" postgres; }
$as initdb -D data -A trust >/dev/null
start
tcp "create table item(id int primary key, name text)"
local_ "insert into item select i, md5(i::text) from generate_series(1, 20000) i"
tcp "create index by_name on item(name)"
tcp "select count(*), min(name), max(name) from item"
local_ "set max_parallel_workers_per_gather = 2; set parallel_setup_cost = 0; set parallel_tuple_cost = 0; set min_parallel_table_scan_size = 0; select sum(id) from item where name like '%a%'"
tcp "select current_user, pg_backend_pid() > 0, inet_server_port()"
tcp "select 1 / 0" 2>&1 || echo "exit $?"
$as pgbench -h 127.0.0.1 -p 15432 -i -s 1 -q postgres >/dev/null 2>&1
$as pgbench -h 127.0.0.1 -p 15432 -c 4 -j 2 -t 50 postgres 2>/dev/null | grep -E 'processed|failed'
$as pg_dump -h 127.0.0.1 -p 15432 -t item postgres | grep -v restrict | sha256sum
stop immediate
start
tcp "select count(*) from item; select (select sum(bbalance) from pgbench_branches) = (select sum(delta) from pgbench_history)"
stop fast
grep -c 'database system was not properly shut down' log
