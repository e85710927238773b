# Jobs: in the background, waited for, stopped and continued.
set -m
exec 2>/dev/null
sleep 0.05 & first=$!
(exit 3) & second=$!
wait $second; echo "second $?"
wait $first; echo "first $?"
sleep 30 & job=$!
jobs -r | sed 's/  */ /g'
kill -STOP %1
while [ "$(cut -d' ' -f3 /proc/$job/stat)" != T ]; do sleep 0.01; done
jobs -s | sed 's/  */ /g'
kill -CONT %1
kill %1
wait $job; echo "ended $?"
for i in 1 5 9; do (sleep 0.$i; exit $i) & done
for i in 1 2 3; do wait -n; echo "next $?"; done
sleep 30 & group=$!
[ "$(cut -d' ' -f5 /proc/$group/stat)" = $group ] && echo "a group of its own"
kill -TERM -- -$group; wait $group; echo "group $?"
