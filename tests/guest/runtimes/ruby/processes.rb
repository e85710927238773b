# Child processes: fork, popen, spawn, pipes, their ends.
require 'open3'

reader, writer = IO.pipe
pid = fork do
  reader.close
  writer.puts "child of #{Process.ppid == Process.pid}"
  exit! 3
end
writer.close
puts reader.read
Process.wait(pid)
puts $?.exitstatus
puts `echo backquotes; exit 2`, $?.exitstatus
IO.popen(%w[sort -r], 'r+') { |io| io.puts(%w[a c b]); io.close_write; puts io.read }
out, error, status = Open3.capture3('sh', '-c', 'cat; echo err >&2; exit 4', stdin_data: 'input ')
p out, error, status.exitstatus
puts system('exit 0'), system('exit 1'), system('/no/such/program').inspect
pid = spawn('sleep 30', pgroup: true)
Process.kill(:TERM, -Process.getpgid(pid))
puts Process.wait2(pid)[1].termsig
p Open3.pipeline_r('seq 1 1000', 'wc -l') { |io, _| io.read.strip }
puts Process.clock_gettime(Process::CLOCK_MONOTONIC).positive?
