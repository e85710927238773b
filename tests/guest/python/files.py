"""Files through Python: os, io, pathlib, shutil, tempfile, mmap, glob, stat."""
import errno
import fcntl
import fileinput
import filecmp
import glob
import io
import mmap
import os
import pathlib
import shutil
import stat
import sys
import tarfile
import tempfile
import zipfile

os.closerange(3, 4096)  # what a test runner may leave open
scratch = tempfile.mkdtemp(prefix="thaw-guest-")
os.chdir(scratch)
os.umask(0o022)


def fails(call, *arguments, **named):
    try:
        result = call(*arguments, **named)
    except OSError as error:
        print(call.__name__, errno.errorcode[error.errno])
    else:
        print(call.__name__, "->", result)


print("-- text and binary files")
with open("text", "w", encoding="utf-8") as file:
    print(file.write("zwölf Boxkämpfer\nzweite Zeile\n"))
with open("text", encoding="utf-8") as file:
    print(file.readlines(), file.tell())
with open("text", "rb+") as file:
    file.seek(-7, io.SEEK_END)
    print(file.read(), file.truncate(5), file.seek(0, 2))
with open("text", "a+") as file:
    file.write("appended")
    file.seek(0)
    print(repr(file.read()))
with open("big", "wb", buffering=0) as file:
    print(file.write(bytes(range(256)) * 4096))
print(os.path.getsize("big"))
fails(open, "absent")
fails(open, ".")
fails(open, "text/x")
fails(open, "text", "x")
fails(os.mkdir, "text")
fails(os.rmdir, "absent")
fails(os.listdir, "text")
fails(os.readlink, "text")

print("-- os")
os.makedirs("tree/a/b", exist_ok=True)
pathlib.Path("tree/a/one.txt").write_text("1")
pathlib.Path("tree/a/b/two.txt").write_text("22")
os.symlink("a/one.txt", "tree/link")
os.link("tree/a/one.txt", "tree/hard")
for root, dirs, names in sorted(os.walk("tree")):
    print(root, sorted(dirs), sorted(names))
print(sorted(entry.name for entry in os.scandir("tree") if entry.is_file(follow_symlinks=False)))
info = os.stat("tree/hard")
print(stat.filemode(info.st_mode), info.st_nlink, info.st_size)
os.chmod("tree/hard", 0o600)
os.utime("tree/hard", (1000000000, 1000000002))
print(oct(os.stat("tree/hard").st_mode), os.stat("tree/hard").st_mtime, os.stat("tree/hard").st_mtime_ns)
print(os.path.realpath("tree/link") == os.path.join(os.path.realpath(scratch), "tree/a/one.txt"))
print(os.path.samefile("tree/hard", "tree/a/one.txt"))
os.rename("tree/hard", "tree/renamed")
os.replace("tree/renamed", "tree/a/one.txt")
print(sorted(os.listdir("tree")), os.path.exists("tree/hard"))
os.truncate("big", 1000)
print(os.path.getsize("big"))
fails(os.rename, "tree", "tree/a/x")
fails(os.rmdir, "tree")
fails(os.chdir, "text")
os.chdir("tree/a")
print(os.path.relpath(os.getcwd(), os.path.realpath(scratch)))
os.chdir(scratch)
fd = os.open("raw", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
print(os.write(fd, b"abcdef"), os.lseek(fd, 2, os.SEEK_SET), os.read(fd, 2), os.pread(fd, 3, 0))
print(os.writev(fd, [b"x", b"yz"]), os.fstat(fd).st_size, os.get_inheritable(fd), os.isatty(fd))
copy = os.dup(fd)
os.close(fd)
fails(os.close, fd)
os.close(copy)
read_end, write_end = os.pipe()
os.set_blocking(read_end, False)
fails(os.read, read_end, 1)
print(os.write(write_end, b"pipe"), os.read(read_end, 10))
print(fcntl.fcntl(read_end, fcntl.F_GETFD), os.access("raw", os.W_OK), os.access("raw", os.X_OK))
print(sorted(os.listdir("/dev/fd"))[:3] == ["0", "1", "2"], os.cpu_count() >= 1)
print(len(os.urandom(100)), os.urandom(8) != os.urandom(8), os.getrandom(5) != b"")
print(os.statvfs(".").f_namemax, os.sysconf("SC_PAGE_SIZE"), os.uname().sysname)

print("-- pathlib and glob")
tree = pathlib.Path("tree")
print(sorted(str(path) for path in tree.rglob("*.txt")), sorted(glob.glob("tree/**/*.txt", recursive=True)))
(tree / "new").touch()
print((tree / "new").stat().st_size, (tree / "link").is_symlink(), (tree / "link").resolve().name)
(tree / "new").unlink()
(tree / "new").unlink(missing_ok=True)
print(tree.joinpath("a", "b").exists(), pathlib.PurePosixPath("/a/b.c").suffix)

print("-- shutil")
shutil.copytree("tree", "copy", symlinks=True)
comparison = filecmp.dircmp("tree", "copy")
print(comparison.left_only, comparison.right_only, comparison.diff_files)
shutil.copy2("big", "big2")
print(filecmp.cmp("big", "big2", shallow=False))
shutil.move("big2", "copy/moved")
print(os.path.exists("copy/moved"), shutil.disk_usage(".").total > 0)
shutil.make_archive("packed", "zip", "tree")
with zipfile.ZipFile("packed.zip") as archive:
    print(sorted(archive.namelist()), archive.testzip())
with tarfile.open("packed.tar.gz", "w:gz") as archive:
    archive.add("tree")
with tarfile.open("packed.tar.gz") as archive:
    print(sorted(archive.getnames()), archive.extractfile("tree/a/b/two.txt").read())
shutil.rmtree("copy")
print(sorted(os.listdir(".")))

print("-- tempfile")
with tempfile.TemporaryFile() as file:
    file.write(b"x" * 10000)
    file.seek(9999)
    print(file.read(), os.fstat(file.fileno()).st_nlink)
with tempfile.NamedTemporaryFile(dir=".", delete=True) as file:
    name = file.name
    print(os.path.exists(name), oct(os.stat(name).st_mode))
print(os.path.exists(name))
with tempfile.TemporaryDirectory() as directory:
    pathlib.Path(directory, "inside").write_bytes(b"1")
print(os.path.exists(directory))
with tempfile.SpooledTemporaryFile(max_size=10) as file:
    file.write(b"0123456789abcdef")
    file.seek(0)
    print(file.read())

print("-- mmap")
with open("big", "r+b") as file:
    with mmap.mmap(file.fileno(), 0) as memory:
        print(len(memory), memory[:4], memory.find(b"\xff"))
        memory[0:4] = b"ABCD"
        memory.flush()
    file.seek(0)
    print(file.read(6))
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        memory[0:4] = b"zzzz"
    file.seek(0)
    print(file.read(4))
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        try:
            memory[0] = 1
        except TypeError as error:
            print(error)
with mmap.mmap(-1, 10000) as memory:
    memory.write(b"anonymous")
    memory.resize(20000)
    print(memory[:9], len(memory))

print("-- the rest")
with fileinput.input(["text"]) as lines:
    print([line for line in lines])
sys.stdout.flush()
os.chdir("/")
shutil.rmtree(scratch)
print(os.path.exists(scratch))
