# frozen_string_literal: true

# Asks Thaw to freeze this program, and tells which copy of it this is.
#
#   require_relative "thaw"
#
#   Thaw.before_freeze { connections.close }     # what no two copies may share
#   Thaw.after_thaw { |generation| connections.open }
#   load_everything
#   generation = Thaw.freeze_here                # copies begin here
#
# One file without dependencies: copy it beside your program. It talks to
# /dev/thaw, which every sandbox has. Outside a sandbox, freeze_here does nothing
# and returns 0, so that the same program runs anywhere. (It is not called freeze,
# which every object of Ruby has already.)
module Thaw
  DEVICE = "/dev/thaw"
  @before = []
  @after = []

  class << self
    # Calls the block before a freeze; the last one given is called first.
    def before_freeze(&hook)
      @before << hook
    end

    # Calls the block with the generation when freeze_here goes on, in the order
    # given: in every copy, and in the original too if it was not ended.
    def after_thaw(&hook)
      @after << hook
    end

    # Which copy this is: 0 for the original, n for a copy of the n-th generation. A
    # copy of a copy that was frozen again is of the next generation.
    def generation
      Integer(File.read(DEVICE).strip, 10)
    rescue Errno::ENOENT
      0
    end

    # Freezes the program here, if somebody wants that, and returns the generation.
    #
    # Comes back at once if nobody does (thaw run), or if this is a copy already. All
    # other threads must come to wait for something; the function says
    # freeze = "program" in [entry] of its thaw.toml if it waits for clients earlier.
    def freeze_here
      return 0 unless File.exist?(DEVICE)

      @before.reverse_each(&:call)
      File.open(DEVICE, File::WRONLY) { |device| device.syswrite("freeze") }
      which = generation
      @after.each { |hook| hook.call(which) }
      which
    end

    # Seeds the generator of Kernel#rand if this is another copy than at the last call;
    # returns whether it has.
    #
    # Call it where a request begins, in a program that is frozen when it first waits for
    # clients: until then all copies draw the same numbers. Generators of your own
    # (Random.new) are to be made anew where it returns true.
    def reseed
      which = generation
      return false if which == @seeded

      @seeded = which
      Random.srand
      true
    end
  end
end
