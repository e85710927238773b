# git: commits, branches, a merge, a clone over pipes, packs.
set -eu
cd "$(mktemp -d)"
export HOME=$PWD GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_DATE='2024-01-01T00:00:00Z' GIT_COMMITTER_DATE='2024-01-01T00:00:00Z'
git config --global user.name Thaw; git config --global user.email thaw@example.com
git config --global init.defaultBranch main; git config --global protocol.file.allow always
git init -q one; cd one
for i in 1 2 3; do seq 1 $((i * 100)) > file$i; git add .; git commit -qm "commit $i"; done
git log --oneline
git checkout -qb side HEAD~1; echo side >> file1; git commit -qam side; git checkout -q main
git merge -q side -m merge; git log --format='%h %s' | head -n 3
git diff HEAD~1 --stat | cat
cd ..; git clone -q --no-local one two; cd two; git rev-parse HEAD; git status --short | wc -l
git gc -q; git fsck --strict 2>&1 | tail -n 1; git show HEAD:file1 | tail -n 1
git grep -c 99 | cat; git archive HEAD | tar t | wc -l
