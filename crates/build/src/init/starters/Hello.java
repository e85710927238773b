import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;

/** Answers every request with a greeting. The JDK's own server is enough for that. */
public class Hello {
    // What is done here is done once, when the function is built.
    private static final String GREETING = "Hello from Java!";

    public static void main(String[] arguments) throws Exception {
        int port = Integer.parseInt(System.getenv().getOrDefault("PORT", "8080"));
        HttpServer server = HttpServer.create(new InetSocketAddress(port), 0);
        server.createContext("/", exchange -> {
            String query = exchange.getRequestURI().getQuery();
            String name = query != null && query.startsWith("name=") ? query.substring(5) : "you";
            byte[] body = (GREETING + " Nice to meet " + name + ".\n").getBytes(StandardCharsets.UTF_8);
            exchange.getResponseHeaders().set("Content-Type", "text/plain; charset=utf-8");
            exchange.sendResponseHeaders(200, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        server.start();
    }
}
