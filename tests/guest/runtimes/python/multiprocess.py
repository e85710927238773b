"""multiprocessing, started by fork and by spawn."""

import concurrent.futures
import multiprocessing
import os
from multiprocessing import shared_memory


def square(number):
    return number * number


def fill(connection, value, array, lock, parent):
    connection.send({"parent is parent": os.getppid() == parent})
    for _ in range(100):
        with lock:
            value.value += 1
    array[0] = 2.5
    connection.close()


def pump(source, target):
    while (item := source.get()) is not None:
        target.put(item + 1)


def mark(name):
    memory = shared_memory.SharedMemory(name)
    memory.buf[:4] = b"seen"
    memory.close()


def fail():
    raise SystemExit(9)


def main(method):
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        print(method, pool.map(square, range(10)))
    ours, theirs = context.Pipe()
    value, array, lock = context.Value("i", 0), context.Array("d", 2), context.Lock()
    processes = [context.Process(target=fill, args=(theirs, value, array, lock, os.getpid())) for _ in range(2)]
    for process in processes:
        process.start()
    print([ours.recv() for _ in processes])
    for process in processes:
        process.join()
    print(value.value, list(array), [process.exitcode for process in processes])
    source, target = context.Queue(), context.Queue()
    process = context.Process(target=pump, args=(source, target))
    process.start()
    for item in [1, 2, None]:
        source.put(item)
    print(target.get(), target.get())
    process.join()
    memory = shared_memory.SharedMemory(create=True, size=4096)
    process = context.Process(target=mark, args=(memory.name,))
    process.start()
    process.join()
    print(bytes(memory.buf[:4]))
    memory.close()
    memory.unlink()
    process = context.Process(target=fail)
    process.start()
    process.join()
    print(process.exitcode)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        print(sum(pool.map(square, range(100))))


if __name__ == "__main__":
    for start_method in ("fork", "spawn"):
        main(start_method)
