# Says all that a program can see of how Ruby was started.
#
# Built from a runtime template, it must say the same as when it was started.
STARTED = [__FILE__, __dir__, __LINE__, __method__, caller(0), $0, $PROGRAM_NAME, Process.argv0]
LOCATIONS = caller_locations(0).map { |at| [at.label, at.base_label, at.path, at.absolute_path] }
LOCALS = [local_variables, TOPLEVEL_BINDING.local_variables]
CONSTANTS = self.class.constants.size
FRAMES = binding.source_location
require 'json'
require 'socket'

def failure
  yield
rescue StandardError, ScriptError => e
  [e.class, e.message, e.backtrace, e.full_message(highlight: false)]
end

def words(path) = File.binread(path).force_encoding('UTF-8').split("\0", -1)

CHILD = 'p ARGV, $0, ENV.to_h, $:'.freeze
SEEN = {
  started: STARTED,
  locations: LOCATIONS,
  locals: LOCALS,
  frames: FRAMES,
  main: [to_s, self.class, self == TOPLEVEL_BINDING.receiver, singleton_methods],
  is_main: __FILE__ == $0,
  argv: [ARGV, $*, ARGV.frozen?, ARGV.map(&:frozen?), ARGV.map(&:encoding), $0.encoding, __FILE__.encoding],
  names: [$0.frozen?, __FILE__.frozen?, $0.hash == 'app.rb'.hash, { $0 => 1 }['app.rb'], $0.to_sym, __FILE__ * 2],
  environment: ENV.to_h,
  encodings: [Encoding.default_external, Encoding.default_internal, __ENCODING__, ENV['PATH'].encoding],
  child: IO.popen([RbConfig.ruby, '-e', CHILD, 'x'], &:read),
  path: $LOAD_PATH,
  own_feature: $LOADED_FEATURES.grep(/thaw|app\.rb/),
  neighbour: [require_relative('neighbour'), Neighbour::NAME],
  flags: [$VERBOSE, $DEBUG, $-w, $-a, $-l, $-p, $-i, $;, $,, $/, $\, $., $_, $~, $!, $@, $?.class],
  options: RubyVM::InstructionSequence.compile_option,
  data: [DATA.path, DATA.fileno, DATA.lineno, DATA.pos, DATA.external_encoding, DATA.autoclose?,
         DATA.close_on_exec?, DATA.inspect, DATA.read],
  failure: failure { raise ArgumentError, 'as an example' },
  missing: failure { load 'missing.rb' },
  nested: failure { eval('1 / 0', binding, 'given.rb', 7) },
  threads: [Thread.list.size, Thread.main == Thread.current, Thread.current.keys],
  signals: %w[INT TERM HUP USR1 PIPE CHLD].to_h { |name| [name, (before = trap(name, 'DEFAULT')).tap { trap(name, before) }] },
  # What was open for the program itself is closed when it is read, unless it has data.
  files: ObjectSpace.each_object(File).reject(&:closed?).map { |file| [file.path, file.fileno] }.sort,
  descriptors: Dir.children('/proc/self/fd').sort,
  streams: [$stdin, $stdout, $stderr].map { |io| [io.fileno, io.sync, io.tty?, io.external_encoding] },
  input: $stdin.read,
  cmdline: words('/proc/self/cmdline'),
  environ: words('/proc/self/environ'),
  comm: words('/proc/self/comm'),
  host: Socket.gethostname,
  hosts: words('/etc/hosts'),
  ids: [Process.pid, Process.ppid, Process.uid, Process.gid, File.umask],
  cwd: Dir.pwd,
  root: Dir.children('/').sort,
  links: %w[/ /app /usr /etc].map { |path| File.stat(path).nlink },
  thaws: words('/dev/thaw'),
  collector: [GC.stress, GC.disable, GC.enable, ObjectSpace.garbage_collect],
  methods: Object.private_instance_methods(false).grep(/thaw|load_modules|words/),
  zone: [Time.at(0).zone, ENV['TZ']],
}.freeze
LOADED = $LOADED_FEATURES.dup
DRAWN = [rand(1 << 64), Random.new_seed, Random.rand]

at_exit { exit 7 } if ARGV.include?('--fail')
raise IndexError, 'for nobody to catch' if ARGV.include?('--fail')
abort 'somebody has loaded yaml' if ARGV.include?('--refuse-template') && defined?(YAML)

ANSWERS = {
  '/' => -> { SEEN },
  '/loaded' => -> { LOADED },
  '/drawn' => -> { DRAWN },
  '/import' => -> { Neighbour::NAME },
  '/package' => -> { [require('heavy') || defined?(Heavy::NAME), Heavy::NAME, $LOADED_FEATURES.grep(/heavy/)] },
  '/thaws' => -> { words('/dev/thaw') },
}.freeze

server = TCPServer.new('0.0.0.0', 8080)
loop do
  client = server.accept
  path = client.gets&.split&.fetch(1)
  nil until [nil, "\r\n"].include?(client.gets)
  body = JSON.generate(failure { ANSWERS.fetch(path).call })
  client.write("HTTP/1.1 200 OK\r\nContent-Length: #{body.bytesize}\r\nConnection: close\r\n\r\n#{body}")
  client.close
end
__END__
what is behind the program: ä
