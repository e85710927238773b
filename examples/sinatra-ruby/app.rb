# A Sinatra application: shortens texts, and remembers them in a file.
require 'digest'
require 'json'
require 'sinatra/base'

# Sinatra reads settings of this class when it starts.
class App < Sinatra::Base
  set :host_authorization, permitted_hosts: []

  get '/' do
    "Hello from Sinatra, #{params.fetch('name', 'you')}!\n"
  end

  post '/texts' do
    text = request.body.read
    id = Digest::SHA256.hexdigest(text)[0, 12]
    File.write("/tmp/#{id}", text)
    content_type :json
    JSON.generate(id: id, words: text.split.size, longest: text.split.max_by(&:size))
  end
end
