# A gem that no template has seen.
Gem::Specification.new do |gem|
  gem.name = 'heavy'
  gem.version = '1.0.0'
  gem.summary = 'A library that a program loads'
  gem.authors = ['Thaw']
  gem.require_paths = ['lib']
end
