# frozen_string_literal: true

require "socket"
require_relative "thaw"

events = []
Thaw.before_freeze { events << "closed last" }
Thaw.before_freeze { events << "closed first" }
Thaw.after_thaw { |generation| events << "opened in #{generation}" }
Thaw.after_thaw { events << "opened last" }
which = Thaw.freeze_here

server = TCPServer.new(8080)
loop do
  client = server.accept
  until client.gets.to_s.strip.empty?; end
  text = "copy #{which}: #{events.join(', ')}\n"
  client.write("HTTP/1.1 200 OK\r\nContent-Length: #{text.bytesize}\r\nConnection: close\r\n\r\n#{text}")
  client.close
end
