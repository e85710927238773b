import com.sun.net.httpserver.HttpServer;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.util.HexFormat;
import java.util.UUID;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/** Shows what must differ between copies of one image, and what must not. */
public final class App {
    /** Counts in a pool that is asleep when the program is frozen. */
    private static final AtomicInteger TICKS = new AtomicInteger();

    private static String read(String path) throws java.io.IOException {
        return Files.readString(Path.of(path)).trim();
    }

    private static String identity() throws Exception {
        byte[] bytes = new byte[16];
        new SecureRandom().nextBytes(bytes);
        byte[] strong = new byte[16];
        SecureRandom.getInstance("NativePRNGNonBlocking").nextBytes(strong);
        int before = TICKS.get();
        Thread.sleep(100);
        return """
            {"unique": {"bytes": "%s", "native": "%s", "uuid": "%s", "boot_id": "%s"},
             "hostname": "%s", "pid": %d, "time": %d.0, "ticked": %d,
             "greeting": "%s", "limit": "%s"}""".formatted(
            HexFormat.of().formatHex(bytes), HexFormat.of().formatHex(strong), UUID.randomUUID(),
            read("/proc/sys/kernel/random/boot_id"), InetAddress.getLocalHost().getHostName(),
            ProcessHandle.current().pid(), System.currentTimeMillis() / 1000, TICKS.get() - before,
            System.getenv("GREETING"), read("/sys/fs/cgroup/memory.max"));
    }

    public static void main(String[] arguments) throws Exception {
        Executors.newScheduledThreadPool(2)
            .scheduleAtFixedRate(TICKS::incrementAndGet, 10, 10, TimeUnit.MILLISECONDS);
        HttpServer server = HttpServer.create(new InetSocketAddress(8080), 0);
        server.createContext("/", exchange -> {
            byte[] body;
            try {
                body = identity().getBytes(StandardCharsets.UTF_8);
            } catch (Exception error) {
                throw new java.io.IOException(error);
            }
            exchange.sendResponseHeaders(200, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        server.start();
    }
}
