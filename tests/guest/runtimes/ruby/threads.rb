# Threads, queues, sockets, fibers, files.
require 'digest'
require 'fileutils'
require 'json'
require 'monitor'
require 'open3'
require 'socket'
require 'tempfile'
require 'timeout'
require 'zlib'

mutex = Mutex.new
total = 0
8.times.map { Thread.new { 1000.times { mutex.synchronize { total += 1 } } } }.each(&:join)
puts "counted #{total}"

queue = SizedQueue.new(2)
consumer = Thread.new { sum = 0; while (item = queue.pop) do sum += item end; sum }
100.times { |i| queue << i }
queue << nil
puts "sum #{consumer.value}"
failing = Thread.new { raise ArgumentError, 'in a thread' }
failing.report_on_exception = false
begin
  failing.join
rescue ArgumentError => e
  puts e.message
end
begin
  Timeout.timeout(0.02) { sleep 10 }
rescue Timeout::Error
  puts 'timed out'
end

server = TCPServer.new('127.0.0.1', 0)
serving = Thread.new do
  5.times.map do
    client = server.accept
    Thread.new { while (line = client.gets) do client.puts(line.upcase) end; client.close }
  end.each(&:join)
end
answers = 5.times.map do |i|
  Thread.new do
    socket = TCPSocket.new('127.0.0.1', server.addr[1])
    lines = 3.times.map { |n| socket.puts("client #{i} line #{n}"); socket.gets.chomp }
    socket.close
    lines
  end
end
answers.each { |thread| puts thread.value.join(', ') }
serving.join

fiber = Fiber.new { |x| 3.times { x = Fiber.yield(x * 2) }; :done }
p [1, 2, 3, 4].map { |x| fiber.resume(x) }
p Enumerator.new { |y| a, b = 0, 1; loop { y << a; a, b = b, a + b } }.lazy.select(&:even?).first(8)

Dir.mktmpdir do |directory|
  path = File.join(directory, 'data')
  File.write(path, 'x' * 100_000)
  File.open(path, 'a') { |file| file.flock(File::LOCK_EX); file.puts('end') }
  puts File.size(path), Digest::SHA256.hexdigest(File.read(path))
  puts Zlib::Inflate.inflate(Zlib::Deflate.deflate(File.read(path))).size
  FileUtils.mkdir_p(File.join(directory, 'a/b'))
  puts Dir.glob('**/*', base: directory).sort.inspect
end
puts JSON.generate(JSON.parse('{"a": [1, 2.5, null, "ü"]}'))
trap('USR1') { puts 'signal' }
Process.kill('USR1', Process.pid)
sleep 0.05
GC.start
puts ObjectSpace.count_objects[:TOTAL].positive?
