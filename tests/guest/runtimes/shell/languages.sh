# Languages that have no page of their own here: a collector, threads or processes
# in each.
set -eu
cd "$(mktemp -d)"
echo 'local t = {}; for i = 1, 200000 do t[i] = {i} end; t = nil; collectgarbage(); print(_VERSION, ("x"):rep(3))' > a.lua
lua5.4 a.lua
erl -noshell -eval 'Self = self(), [spawn(fun() -> Self ! {I, lists:sum(lists:seq(1, I * 100))} end) || I <- lists:seq(1, 200)], io:format("~p~n", [lists:sum([receive {I, X} -> X end || I <- lists:seq(1, 200)])]), halt().'
sbcl --noinform --non-interactive --eval '(progn (print (loop for i below 100000 sum i)) (terpri) (gc :full t) (print (sb-thread:join-thread (sb-thread:make-thread (lambda () (length (loop for i below 100000 collect (list i))))))) (terpri))'
echo 'puts [expr {2 ** 100}]; after 10 {set done 1}; vwait done; puts $done; puts [exec echo from a child]' | tclsh
echo 'let () = Gc.full_major (); Printf.printf "%d\n" (List.fold_left (+) 0 (List.init 100000 Fun.id))' > a.ml
ocaml a.ml; ocamlopt a.ml -o compiled; ./compiled
printf 'import Control.Concurrent\nimport Control.Monad\nmain = do\n  sums <- newMVar 0\n  ends <- forM [1 .. 50] $ \\i -> do\n    end <- newEmptyMVar\n    _ <- forkIO (replicateM_ 100 (modifyMVar_ sums (return . (+ i))) >> putMVar end ())\n    return end\n  mapM_ takeMVar ends\n  readMVar sums >>= print\n' > a.hs
ghc -v0 -threaded -rtsopts a.hs -o haskell; ./haskell +RTS -N2
Rscript -e 'library(parallel); cat(dim(solve(matrix(runif(10000), 100))), sum(unlist(mclapply(1:8, function(i) i * i, mc.cores = 2))), "\n")'
