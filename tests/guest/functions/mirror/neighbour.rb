# A file among the program's own, which no template has seen.
module Neighbour
  NAME = 'neighbour'.freeze
end
