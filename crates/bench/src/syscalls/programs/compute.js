// Floating point, containers and strings, without a system call in between.
function work(n) {
  let total = 0;
  const words = new Map();
  for (let i = 0; i < n; i++) {
    total += Math.sqrt((i * i) % 7);
    const key = String(i % 1000);
    words.set(key, (words.get(key) ?? 0) + 1);
  }
  return total + words.size;
}
work(1_000_000);
const begin = process.hrtime.bigint();
const sum = work(8_000_000);
const end = process.hrtime.bigint();
if (!(sum > 0)) throw new Error("no sum");
console.log(Number(end - begin) / 1e6);
