import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.List;

public class App {
    public static void main(String[] arguments) throws Exception {
        List<String> events = new ArrayList<>();
        Thaw.beforeFreeze(() -> events.add("closed last"));
        Thaw.beforeFreeze(() -> events.add("closed first"));
        Thaw.afterThaw(generation -> events.add("opened in " + generation));
        Thaw.afterThaw(generation -> events.add("opened last"));
        long which = Thaw.freeze();

        HttpServer server = HttpServer.create(new InetSocketAddress(8080), 16);
        server.createContext("/", exchange -> {
            byte[] body = ("copy " + which + ": " + String.join(", ", events) + "\n").getBytes();
            exchange.sendResponseHeaders(200, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        server.start();
    }
}
