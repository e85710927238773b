package mirror;

import com.sun.net.httpserver.HttpServer;
import com.sun.tools.attach.VirtualMachine;
import java.io.File;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.lang.management.ManagementFactory;
import java.lang.management.RuntimeMXBean;
import java.net.InetSocketAddress;
import java.nio.charset.Charset;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TimeZone;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * Says all that a program can see of how Java was started.
 *
 * <p>Built from a runtime template, it must say the same as when it was started.
 */
public final class App {
    private App() {}

    interface Action {
        Object run() throws Throwable;
    }

    private static Object failure(Action action) {
        try {
            return action.run();
        } catch (Throwable error) {
            return stack(error);
        }
    }

    private static String stack(Throwable error) {
        StringWriter text = new StringWriter();
        error.printStackTrace(new PrintWriter(text));
        return text.toString();
    }

    private static Object words(String file) {
        return failure(() -> Arrays.asList(
                new String(Files.readAllBytes(Path.of(file)), StandardCharsets.ISO_8859_1).split("\0", -1)));
    }

    /** The class loader without its address. */
    private static String shown(ClassLoader loader) {
        return loader == null ? "none" : loader.getName() + " " + loader.getClass() + " "
                + (loader == ClassLoader.getSystemClassLoader()) + " " + shown(loader.getParent());
    }

    private static Object child() throws Exception {
        String java = ProcessHandle.current().info().command().orElseThrow();
        String path = System.getProperty("java.class.path");
        Process child = new ProcessBuilder(
                java, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", path, "mirror.Child")
                .redirectErrorStream(true).start();
        String said = new String(child.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
        return said + " " + child.waitFor();
    }

    private static Object descriptors() {
        List<String> found = new ArrayList<>();
        for (File file : new File("/proc/self/fd").listFiles()) {
            Object link = failure(() -> Files.readSymbolicLink(file.toPath()).toString().replaceAll("\\d+", "N"));
            // Closed meanwhile: that of the listing, and what another thread of the JVM had open for a moment. It
            // looks at its limits now and then, too.
            if (!link.toString().startsWith("java.") && !link.toString().startsWith("/sys/fs/cgroup/"))
                found.add(file.getName() + " " + link);
        }
        found.sort(null);
        return found;
    }

    private static Map<String, Object> seen(String[] arguments, Throwable started) {
        Map<String, Object> seen = new LinkedHashMap<>();
        RuntimeMXBean machine = ManagementFactory.getRuntimeMXBean();
        Thread thread = Thread.currentThread();
        seen.put("started", stack(started));
        seen.put("arguments", Arrays.asList(arguments));
        seen.put("properties", new TreeMap<>(System.getProperties()));
        seen.put("options", machine.getInputArguments());
        seen.put("class path", machine.getClassPath());
        seen.put("environment", System.getenv());
        seen.put("child", failure(App::child));
        seen.put("directories", List.of(new File("").getAbsolutePath(), Path.of("").toAbsolutePath().toString(),
                failure(() -> new File(".").getCanonicalPath()), failure(() -> Files.readString(Path.of("neighbour.txt"))),
                new File("neighbour.txt").exists()));
        seen.put("thread", List.of(thread.getName(), thread.getId(), thread.getPriority(), thread.isDaemon(),
                thread.getThreadGroup().getName()));
        seen.put("threads", new TreeSet<>(Thread.getAllStackTraces().keySet().stream()
                .map(Thread::getName).collect(Collectors.toSet())));
        seen.put("loaders", List.of(shown(App.class.getClassLoader()), shown(thread.getContextClassLoader()),
                shown(ClassLoader.getSystemClassLoader())));
        seen.put("module", App.class.getModule().toString().replaceAll("@[0-9a-f]+", ""));
        seen.put("modules", ModuleLayer.boot().modules().stream().map(Module::getName).sorted().collect(Collectors.toList()));
        seen.put("source", String.valueOf(App.class.getProtectionDomain().getCodeSource().getLocation()));
        seen.put("resource", String.valueOf(ClassLoader.getSystemResource("mirror/App.class")));
        seen.put("assertions", App.class.desiredAssertionStatus());
        seen.put("bootstrap", String.valueOf(ClassLoader.getSystemResource("thaw_template/Bootstrap.class")));
        seen.put("failure", failure(() -> { throw new IllegalStateException("as an example"); }));
        seen.put("locale", List.of(Locale.getDefault(), TimeZone.getDefault().getID(), Charset.defaultCharset().name()));
        seen.put("memory", Runtime.getRuntime().maxMemory());
        // A template leaves one.
        seen.put("packages", Stream.of(App.class.getClassLoader().getDefinedPackages())
                .map(Package::getName).filter(name -> !name.equals("thaw_template")).collect(Collectors.toList()));
        seen.put("processors", Runtime.getRuntime().availableProcessors());
        seen.put("collectors", ManagementFactory.getGarbageCollectorMXBeans().stream()
                .map(bean -> bean.getName()).collect(Collectors.toList()));
        for (String name : List.of("cmdline", "environ", "comm")) {
            seen.put(name, words("/proc/self/" + name));
        }
        ProcessHandle.Info self = ProcessHandle.current().info();
        seen.put("process", List.of(self.command().orElse(""), Arrays.asList(self.arguments().orElse(new String[0]))));
        seen.put("ids", failure(() -> Files.getAttribute(Path.of("/proc/self"), "unix:uid")));
        seen.put("root", failure(() -> {
            try (Stream<Path> all = Files.list(Path.of("/"))) {
                return all.map(Path::toString).sorted().collect(Collectors.toList());
            }
        }));
        seen.put("descriptors", descriptors());
        seen.put("console", String.valueOf(System.console()));
        seen.put("thaws", words("/dev/thaw"));
        return seen;
    }

    /** Whether the bootstrap of a template is among the classes: it is what a template leaves. */
    private static boolean isFromTemplate() {
        try {
            return Class.forName("thaw_template.Bootstrap") != null;
        } catch (ClassNotFoundException none) {
            return false;
        }
    }

    private static String json(Object value) {
        if (value instanceof Map) {
            return ((Map<?, ?>) value).entrySet().stream()
                    .map(entry -> json(entry.getKey().toString()) + ":" + json(entry.getValue()))
                    .collect(Collectors.joining(",", "{", "}"));
        }
        if (value instanceof Iterable) {
            List<String> all = new ArrayList<>();
            ((Iterable<?>) value).forEach(one -> all.add(json(one)));
            return "[" + String.join(",", all) + "]";
        }
        if (value instanceof Number || value instanceof Boolean) {
            return value.toString();
        }
        StringBuilder text = new StringBuilder("\"");
        String.valueOf(value).chars().forEach(c -> {
            if (c < ' ' || c == '"' || c == '\\' || c > '~') {
                text.append(String.format("\\u%04x", c));
            } else {
                text.append((char) c);
            }
        });
        return text.append('"').toString();
    }

    /** Has this virtual machine load an agent. */
    private static Object attached() throws Exception {
        VirtualMachine machine = VirtualMachine.attach(String.valueOf(ProcessHandle.current().pid()));
        machine.loadAgent("/app/agent.jar", "loaded");
        machine.detach();
        return System.getProperty("mirror.agent");
    }

    private static Object answer(String path, Map<String, Object> seen, List<Double> drawn) throws Exception {
        switch (path) {
            case "/":
                return seen;
            case "/agent":
                return attached();
            case "/drawn":
                return drawn;
            case "/import":
                return Neighbour.NAME;
            case "/thaws":
                return words("/dev/thaw");
            default:
                return null;
        }
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, Object> seen = seen(arguments, new Throwable("at the top level"));
        List<String> words = Arrays.asList(arguments);
        if (words.contains("--refuse-template") && isFromTemplate()) {
            throw new IllegalStateException("somebody was here before");
        }
        if (words.contains("--fail")) {
            throw new IllegalArgumentException("for nobody to catch");
        }
        List<Double> drawn = List.of(Math.random(), Math.random());
        HttpServer server = HttpServer.create(new InetSocketAddress("0.0.0.0", 8080), 0);
        server.createContext("/", exchange -> {
            Object said = failure(() -> answer(exchange.getRequestURI().getPath(), seen, drawn));
            byte[] body = json(said).getBytes(StandardCharsets.UTF_8);
            exchange.getResponseHeaders().set("Content-Type", "application/json");
            exchange.sendResponseHeaders(200, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        server.start();
    }
}
