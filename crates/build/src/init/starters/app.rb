# Answers every request with a greeting. Ruby's own library is enough for that; with gems
# (Sinatra, Rack), add a Gemfile and a config.ru and run `thaw init --force`.
require 'socket'
require 'uri'

# What is done here is done once, when the function is built.
GREETING = 'Hello from Ruby!'

def answer(client)
  _method, target, = client.gets.to_s.split
  nil until client.gets.to_s.strip.empty?
  query = URI.decode_www_form(URI(target || '/').query.to_s).to_h
  body = "#{GREETING} Nice to meet #{query.fetch('name', 'you')}.\n"
  client.write "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n" \
               "Content-Length: #{body.bytesize}\r\nConnection: close\r\n\r\n", body
rescue URI::InvalidURIError
  client.write "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
ensure
  client.close
end

server = TCPServer.new('0.0.0.0', Integer(ENV.fetch('PORT', '8080')))
loop { Thread.new(server.accept) { |client| answer(client) } }
