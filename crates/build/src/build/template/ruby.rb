# frozen_string_literal: true

# Turns Ruby into a runtime template, and its copies into programs.
#
# Ruby loads this file as `-r` (RUBYOPT) when it has opened the file of the program and before it
# reads it. In the template that file is this one. A copy opens the file of its program in its
# place, and gives its name to the strings that have the name of this one. Ruby then reads the
# program as if it had been started with it: nothing of this file is below it.
# `docs/decisions/0046-templates-of-each-language.md` says why it is done so.

lambda do
  word = 'thaw-template'
  # The name that the interpreter was started with, which is like no other string.
  script = $0

  # Where the names and the open file of the program are.
  strings = lambda do
    found = []
    ObjectSpace.each_object(String) { |text| found << text if text.frozen? && text == script }
    found
  end
  program_file = lambda do
    ObjectSpace.each_object(File).find { |file| !file.closed? && file.path == script }
  end

  # struct RString of a string that is not embedded (internal/string.h): flags, class, length,
  # pointer, capacity.
  not_embedded = 1 << 13
  known_bytes = 3 << 20
  word_size = 8
  layout = lambda do |text|
    Fiddle::Pointer.new(Fiddle.dlwrap(text), 5 * word_size)[0, 5 * word_size].unpack('Q5')
  end
  check_layout = lambda do |text|
    flags, _, size, pointer = layout.call(text)
    known = flags & not_embedded != 0 && size == text.bytesize &&
            Fiddle::Pointer.new(pointer, size)[0, size] == text.b
    raise "strings of Ruby #{RUBY_VERSION} are not as they are known" unless known
  end
  # Gives a frozen string other bytes.
  rename = lambda do |text, name|
    shared = 1 << 12
    flags, _, _, _, capacity = layout.call(text)
    bytes = Fiddle::Pointer.new(Fiddle.malloc(name.bytesize + 1), name.bytesize + 1)
    bytes[0, name.bytesize + 1] = "#{name.b}\0"
    capacity = name.bytesize if flags & shared == 0
    raw = Fiddle::Pointer.new(Fiddle.dlwrap(text), 5 * word_size)
    raw[0, word_size] = [flags & ~known_bytes].pack('Q')
    raw[2 * word_size, 3 * word_size] = [name.bytesize, bytes.to_i, capacity].pack('Q3')
  end

  words = ->(path) { File.binread(path).split("\0", -1)[0...-1] }

  load_modules = ->(names) { names.each { |name| require name } }

  freeze_template = lambda do
    3.times { GC.start }
    File.open('/dev/thaw', 'w') { |device| device.syswrite('template') }
  end

  take_environment = lambda do
    variables = words.call('/proc/self/environ').map do |variable|
      variable.force_encoding(Encoding.find('locale')).split('=', 2)
    end
    ENV.clear
    variables.each { |name, value| ENV[name] = value }
  end

  # Reads the program in the place of this file, unless its first line has a say in how.
  open_program = lambda do |file, name|
    # Reading by lines would count them.
    first = File.binread(name, 4096)&.lines&.first
    if first&.start_with?('#!') && !first.match?(/ruby[0-9.]*\s*\z/)
      abort "the first line of #{name} gives options to its interpreter"
    end
    file.reopen(name, 'r')
  end

  # Gems of the program that the template has not seen are found, and the newest of each is the one
  # that `require` would have taken (Kernel#require of RubyGems, "default gems").
  check_gems = lambda do
    return unless defined?(Gem)

    Gem.clear_paths
    Gem.loaded_specs.each_value do |loaded|
      newest = Gem::Specification.stubs_for(loaded.name).map(&:version).max
      next if newest.nil? || newest <= loaded.version

      abort "the template has loaded the gem #{loaded.name} #{loaded.version}, and there is #{newest}"
    end
  end

  # A file of the program that lies before one of the template in the search path, and would have been
  # loaded instead.
  check_load_path = lambda do
    directories = $LOAD_PATH.map { |path| File.expand_path(path) }
    there = directories.map { |path| File.directory?(path) }
    $LOADED_FEATURES.each do |feature|
      homes = directories.each_index.select { |at| feature.start_with?("#{directories[at]}/") }
      # Those of compiled features may lie below others.
      home = homes.max_by { |at| [directories[at].length, -at] } or next
      name = feature.delete_prefix(directories[home]).sub(/\.(rb|so)\z/, '')
      (0...home).each do |before|
        next unless there[before]

        hiding = %w[.rb .so].map { |suffix| directories[before] + name + suffix }.find { |path| File.file?(path) }
        # One that is loaded, too, has asked for the other: monitor.rb for monitor.so.
        next if hiding.nil? || $LOADED_FEATURES.include?(hiding)

        abort "the template has loaded #{feature}, and there is #{hiding}"
      end
    end
  end

  take_program = lambda do |file, names, arguments|
    locale = Encoding.find('locale')
    name, *rest = arguments.map { |text| text.force_encoding(locale) }
    open_program.call(file, name)
    names.each { |text| rename.call(text, name) }
    ARGV.replace(rest.map(&:freeze))
    # It was seeded in the template.
    Random.srand
  end

  require 'fiddle'
  File.unlink(__FILE__)
  file = program_file.call or raise 'the open file of the program is not found'
  names = strings.call
  raise 'the name of the program is not found' if names.empty?
  names.each { |text| check_layout.call(text) }

  given = ARGV.drop(1)
  loop do
    load_modules.call(given)
    freeze_template.call
    take_environment.call
    arguments = words.call('/proc/self/cmdline').drop(1)
    unless arguments[1] == word
      check_gems.call
      check_load_path.call
      take_program.call(file, names, arguments)
      break
    end
    given = arguments.drop(2)
  end
  # Ruby notes a file as loaded at the end of `require`.
  own = __FILE__
  point = TracePoint.new(:return, :c_return) do |event|
    next unless event.method_id == :require

    point.disable
    $LOADED_FEATURES.delete(own)
  end
  point.enable
end.call
