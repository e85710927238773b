# A newer one of a gem that comes with Ruby.
Gem::Specification.new do |gem|
  gem.name = 'singleton'
  gem.version = '99.0.0'
  gem.summary = 'A newer one than that of Ruby'
  gem.authors = ['Thaw']
  gem.require_paths = ['lib']
end
