import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;

/** A web server made of nothing but Java's own library. */
public class Hello {
    private static final AtomicInteger REQUESTS = new AtomicInteger();

    static void greet(HttpExchange exchange) throws IOException {
        String query = exchange.getRequestURI().getQuery();
        String name = query != null && query.startsWith("name=") ? query.substring(5) : "you";
        String text = "Hello from Java " + Runtime.version().feature() + "! Nice to meet " + name
                + ", request " + REQUESTS.incrementAndGet() + ".\n";
        byte[] body = text.getBytes(StandardCharsets.UTF_8);
        exchange.getResponseHeaders().set("Content-Type", "text/plain; charset=utf-8");
        exchange.sendResponseHeaders(200, body.length);
        exchange.getResponseBody().write(body);
        exchange.close();
    }

    public static void main(String[] arguments) throws IOException {
        int port = Integer.parseInt(System.getenv().getOrDefault("PORT", "8080"));
        HttpServer server = HttpServer.create(new InetSocketAddress("0.0.0.0", port), 16);
        server.createContext("/", Hello::greet);
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.start();
    }
}
