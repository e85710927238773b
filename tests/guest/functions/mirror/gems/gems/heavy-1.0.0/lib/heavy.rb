# A library that no template has seen.
module Heavy
  NAME = 'heavy'.freeze
end
