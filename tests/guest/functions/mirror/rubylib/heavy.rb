# A library that a template loads.
module Heavy
  NAME = 'heavy'.freeze
end
