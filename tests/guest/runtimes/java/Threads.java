import java.io.IOException;
import java.lang.ref.WeakReference;
import java.math.BigInteger;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Random;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.LongStream;

/** Threads, locks, garbage, faults that are exceptions, files and HTTP. */
public class Threads {
    private static int shared;

    static synchronized void add() {
        shared++;
    }

    static void locks() throws Exception {
        Thread[] threads = new Thread[8];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(() -> {
                for (int n = 0; n < 50_000; n++) {
                    add();
                }
            });
            threads[i].start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        System.out.println("counted " + shared);
        ArrayBlockingQueue<Integer> queue = new ArrayBlockingQueue<>(4);
        Thread producer = new Thread(() -> {
            for (int n = 1; n <= 1000; n++) {
                try {
                    queue.put(n);
                } catch (InterruptedException e) {
                    return;
                }
            }
        });
        producer.start();
        long sum = 0;
        for (int n = 0; n < 1000; n++) {
            sum += queue.take();
        }
        System.out.println("queued " + sum);
        Thread sleeper = new Thread(() -> {
            try {
                Thread.sleep(60_000);
            } catch (InterruptedException e) {
                System.out.println("interrupted");
            }
        });
        sleeper.start();
        sleeper.interrupt();
        sleeper.join();
        // It may return "spuriously (that is, for no reason)".
        long begin = System.nanoTime();
        while (System.nanoTime() - begin < 20_000_000) {
            LockSupport.parkNanos(20_000_000);
        }
        System.out.println("parked");
    }

    static void pools() throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(4);
        List<CompletableFuture<BigInteger>> parts = IntStream.range(0, 8)
                .mapToObj(i -> CompletableFuture.supplyAsync(() -> LongStream.rangeClosed(i * 50L + 1, i * 50L + 50)
                        .mapToObj(BigInteger::valueOf).reduce(BigInteger.ONE, BigInteger::multiply), pool))
                .collect(Collectors.toList());
        BigInteger factorial = parts.stream().map(CompletableFuture::join).reduce(BigInteger.ONE, BigInteger::multiply);
        System.out.println("400! has " + factorial.toString().length() + " digits");
        pool.shutdown();
        System.out.println("ended " + pool.awaitTermination(10, TimeUnit.SECONDS));
        System.out.println("parallel " + IntStream.range(0, 2_000_000).parallel().filter(i -> i % 7 == 3).mapToLong(i -> i).sum());
        ScheduledExecutorService timer = Executors.newScheduledThreadPool(1);
        CountDownLatch ticks = new CountDownLatch(3);
        timer.scheduleAtFixedRate(ticks::countDown, 5, 5, TimeUnit.MILLISECONDS);
        System.out.println("ticked " + ticks.await(10, TimeUnit.SECONDS));
        timer.shutdownNow();
    }

    static int depth(int n) {
        return 1 + depth(n + 1);
    }

    static int length(String text) {
        return text.length();
    }

    static void faults() {
        int nulls = 0;
        for (int i = 0; i < 100_000; i++) {
            try {
                length(i % 10 == 0 ? null : "x");
            } catch (NullPointerException e) {
                nulls++;
            }
        }
        System.out.println("null pointers " + nulls);
        try {
            depth(0);
        } catch (StackOverflowError e) {
            System.out.println("stack overflow");
        }
        try {
            System.out.println(1 / (shared - shared));
        } catch (ArithmeticException e) {
            System.out.println(e.getMessage());
        }
    }

    static void garbage() {
        Random random = new Random(1);
        List<byte[]> kept = new ArrayList<>();
        long total = 0;
        for (int i = 0; i < 200_000; i++) {
            byte[] piece = new byte[random.nextInt(2000)];
            total += piece.length;
            if (i % 1000 == 0) {
                kept.add(piece);
            }
        }
        WeakReference<Object> weak = new WeakReference<>(new Object());
        System.gc();
        System.out.println("allocated " + total + ", kept " + kept.size() + ", collected " + (weak.get() == null));
    }

    static void files() throws Exception {
        Path directory = Files.createTempDirectory("java");
        Path file = directory.resolve("data");
        Files.write(file, Arrays.asList("one", "two", "three"));
        System.out.println(Files.readAllLines(file) + " " + Files.size(file));
        byte[] digest = MessageDigest.getInstance("SHA-256").digest(Files.readAllBytes(file));
        System.out.println(HexFormat.of().formatHex(digest));
        Files.move(file, directory.resolve("moved"));
        try (var list = Files.list(directory)) {
            System.out.println(list.map(path -> path.getFileName().toString()).collect(Collectors.toList()));
        }
        Files.delete(directory.resolve("moved"));
        Files.delete(directory);
    }

    static void web() throws Exception {
        var server = com.sun.net.httpserver.HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
        AtomicLong bytes = new AtomicLong();
        server.createContext("/", exchange -> {
            bytes.addAndGet(exchange.getRequestBody().readAllBytes().length);
            byte[] body = exchange.getRequestURI().toString().getBytes();
            exchange.sendResponseHeaders(200, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        ExecutorService pool = Executors.newCachedThreadPool();
        server.setExecutor(pool);
        server.start();
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        String url = "http://127.0.0.1:" + server.getAddress().getPort() + "/";
        var calls = IntStream.range(0, 10)
                .mapToObj(i -> HttpRequest.newBuilder(URI.create(url + i))
                        .POST(HttpRequest.BodyPublishers.ofString("x".repeat(i * 5000))).build())
                .map(request -> client.sendAsync(request, HttpResponse.BodyHandlers.ofString()))
                .collect(Collectors.toList());
        System.out.println(calls.stream().map(call -> call.join().body()).collect(Collectors.joining(" ")));
        System.out.println("posted " + bytes.get());
        server.stop(0);
        pool.shutdownNow();
    }

    public static void main(String[] arguments) throws Exception {
        locks();
        pools();
        faults();
        garbage();
        files();
        web();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> System.out.println("shutdown hook")));
        System.exit(3);
    }
}
