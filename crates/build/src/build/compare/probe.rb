# Loaded before the program, for a build that compares two copies: at SIGPWR it draws from
# the generators that the program has, and says what came and which times the program keeps.
module ThawProbe
  BEGAN = Time.now
  LINES_MAX = 64
  LIBRARIES = [*Gem.path, *RbConfig::CONFIG.values_at('rubylibprefix', 'rubylibdir'), '/.thaw-probe']
              .compact.map { |path| "#{path}/" }

  class << self
    def drawn
      lines = ["Kernel.rand=#{rand}"]
      ObjectSpace.each_object(Random).first(64).each_with_index do |generator, number|
        lines << "an object Random (#{number + 1})=#{generator.rand}"
      end
      lines
    end

    # Times that constants, variables of modules, globals and variables of the main file keep.
    def times
      @found = {}
      look_into_modules
      global_variables.grep(/\A\$[a-z_]\w+\z/).each { |name| look(name, eval(name.to_s)) }
      main = TOPLEVEL_BINDING
      main.local_variables.each { |name| look(name, main.local_variable_get(name)) }
      look_at_variables(main.receiver, 'main')
      @found.first(LINES_MAX).map { |name, value| "time #{name}=#{value.inspect}" }
    end

    private

    def look_into_modules
      waiting = [Object]
      seen = {}
      while (owner = waiting.pop)
        next if seen[owner]

        seen[owner] = true
        waiting.concat(look_at_constants(owner))
      end
    end

    # Looks at the constants that the program's own files have set; returns the modules of them.
    def look_at_constants(owner)
      prefix = owner == Object ? '' : "#{owner}::"
      look_at_variables(owner, owner.to_s) unless owner == Object
      own = owner.constants(false).select { |name| own?(owner, name) }
      values = own.map { |name| [name, owner.const_get(name, false)] }
      modules, others = values.partition { |_, value| Module === value }
      others.each { |name, value| look("#{prefix}#{name}", value) }
      modules.map(&:last)
    end

    # Whether a constant was set by the program's own files. One that is loaded when it is used
    # is left alone.
    def own?(owner, name)
      return false if owner.autoload?(name, false)

      file, = owner.const_source_location(name, false)
      # The main file has the name that the command gives; others are no files.
      file.is_a?(String) && !file.start_with?('<', '(', *LIBRARIES)
    end

    def look_at_variables(object, name)
      object.instance_variables.each do |variable|
        look("#{name}.#{variable}", object.instance_variable_get(variable))
      end
      return unless Module === object

      object.class_variables(false).each do |variable|
        look("#{name}.#{variable}", object.class_variable_get(variable))
      end
    end

    def look(name, value, inside: true)
      if kept?(value)
        @found[name] = value
      elsif inside && Hash === value
        value.first(LINES_MAX).each { |key, item| look("#{name}[#{key.inspect}]", item, inside: false) }
      end
    end

    # Whether it is a time since the program began.
    def kept?(value)
      case value
      when Time then value.between?(Time.at(BEGAN.to_i), Time.now)
      when Integer, Float
        [1, 1000, 1_000_000, 1_000_000_000].any? { |unit| (value / unit).between?(BEGAN.to_i, Time.now.to_f) }
      else
        # DateTime is a Date.
        defined?(::Date) && ::Date === value &&
          (value.respond_to?(:hour) ? kept?(value.to_time) : value == ::Date.today)
      end
    end
  end
end

# A runtime template has seeded it before the program begins.
Random.srand if ENV.delete('THAW_PROBE_SEEDED')
trap('PWR') do
  lines = ThawProbe.drawn
  begin
    lines.concat(ThawProbe.times)
  rescue StandardError
    # Something of the program's does not let others look.
  end
  $stderr.syswrite(lines.push('.').map { |line| "thaw-probe #{line}\n" }.join)
end
