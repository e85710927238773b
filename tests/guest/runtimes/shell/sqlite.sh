# SQLite's shell: transactions, indexes, a journal and a write-ahead log.
set -eu
cd "$(mktemp -d)"
for mode in delete wal; do
    sqlite3 $mode.db <<END
PRAGMA journal_mode = $mode;
CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT, price REAL);
BEGIN;
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)
INSERT INTO item SELECT i, 'item ' || i, i / 7.0 FROM n;
COMMIT;
CREATE INDEX by_name ON item(name);
BEGIN; DELETE FROM item; ROLLBACK;
SELECT count(*), round(sum(price), 3) FROM item;
SELECT * FROM item WHERE name = 'item 4321';
UPDATE item SET price = 0 WHERE id % 2;
PRAGMA integrity_check;
END
    sqlite3 $mode.db 'SELECT count(*) FROM item WHERE price = 0; VACUUM;'
    sqlite3 $mode.db .dump | sha256sum
done
