# Shows what must differ between copies of one image, and what must not.
require 'json'
require 'securerandom'
require 'socket'
require 'webrick'

# Counted by a thread that is asleep when the program is frozen.
$ticks = 0
Thread.new do
  loop do
    sleep 0.01
    $ticks += 1
  end
end

def identity
  before = $ticks
  sleep 0.1
  {
    unique: {
      bytes: SecureRandom.hex(16),
      uuid: SecureRandom.uuid,
      urandom: Random.urandom(16).unpack1('H*'),
      seed: Random.new_seed,
      boot_id: File.read('/proc/sys/kernel/random/boot_id').strip
    },
    hostname: Socket.gethostname,
    pid: Process.pid,
    time: Time.now.to_f,
    ticked: $ticks - before,
    greeting: ENV.fetch('GREETING', nil),
    limit: File.read('/sys/fs/cgroup/memory.max').strip
  }
end

server = WEBrick::HTTPServer.new(Port: 8080, BindAddress: '0.0.0.0', AccessLog: [])
server.mount_proc('/') { |_request, response| response.body = JSON.generate(identity) }
server.start
