# A small load of SQLite in WAL mode, in the current directory. Prints nanoseconds: a line of those
# that write transactions took, and one of queries.
import os, random, sqlite3, tempfile, time

random.seed(1)
directory = tempfile.mkdtemp(prefix="sqlite-", dir=".")
path = os.path.join(directory, "load.db")
database = sqlite3.connect(path, isolation_level=None)
assert database.execute("pragma journal_mode=wal").fetchone() == ("wal",)
database.execute("pragma synchronous=normal")
database.execute("create table orders (id integer primary key, customer integer, text text)")
database.execute("create index by_customer on orders (customer)")


def timed(work):
    began = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began


def write():
    database.execute("begin immediate")
    for _ in range(10):
        row = (random.randrange(100), "x" * 100)
        database.execute("insert into orders (customer, text) values (?, ?)", row)
    database.execute("commit")


def read():
    customer = random.randrange(100)
    found = database.execute("select count(*), max(text) from orders where customer = ?", (customer,))
    assert found.fetchone()[0] >= 0


# More than the thousand pages after which SQLite writes the log back.
writes = [timed(write) for _ in range(300)]
reads = [timed(read) for _ in range(300)]
database.close()
os.unlink(path)
os.rmdir(directory)
print(*writes)
print(*reads)
