# A web server on WEBrick, which came with Ruby until version 3.
require 'webrick'

requests = 0
server = WEBrick::HTTPServer.new(
  Port: Integer(ENV.fetch('PORT', '8080')), BindAddress: '0.0.0.0', AccessLog: []
)
server.mount_proc '/' do |request, response|
  requests += 1
  name = request.query.fetch('name', 'you')
  response['Content-Type'] = 'text/plain; charset=utf-8'
  response.body = "Hello from Ruby! Nice to meet #{name}, request #{requests}.\n"
end
server.start
