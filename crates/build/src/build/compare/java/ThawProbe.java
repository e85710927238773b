import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.lang.instrument.ClassFileTransformer;
import java.lang.instrument.Instrumentation;
import java.lang.reflect.Field;
import java.lang.reflect.Modifier;
import java.nio.charset.StandardCharsets;
import java.security.CodeSource;
import java.security.ProtectionDomain;
import java.time.Instant;
import java.time.LocalDate;
import java.time.LocalDateTime;
import java.time.OffsetDateTime;
import java.time.ZoneId;
import java.time.ZonedDateTime;
import java.util.ArrayList;
import java.util.Calendar;
import java.util.Date;
import java.util.List;
import java.util.Random;
import java.util.SplittableRandom;
import java.util.TreeMap;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.AtomicLong;
import sun.misc.Signal;
import sun.misc.SignalHandler;

/**
 * Loaded before the program, for a build that compares two copies: at SIGPWR it draws from the
 * generators that static fields of the program lead to, and says what came and which times it
 * found there. scripts/java-classes makes ThawProbe.class of this file.
 */
public final class ThawProbe implements ClassFileTransformer, SignalHandler {
    private static final int LINES_MAX = 128;
    private static final byte[] THREAD_LOCAL =
            "java/util/concurrent/ThreadLocalRandom".getBytes(StandardCharsets.US_ASCII);

    private final Instrumentation instrumentation;
    private final long began = System.currentTimeMillis();
    /** Whether a class of the program names ThreadLocalRandom. */
    private volatile boolean usesThreadLocal;
    /** Where the first class of the program came from. */
    private volatile String first;
    private final TreeMap<String, String> drawn = new TreeMap<>();
    private final TreeMap<String, String> times = new TreeMap<>();

    private ThawProbe(Instrumentation instrumentation) {
        this.instrumentation = instrumentation;
    }

    public static void premain(String arguments, Instrumentation instrumentation) {
        ThawProbe probe = new ThawProbe(instrumentation);
        instrumentation.addTransformer(probe);
        Signal.handle(new Signal("PWR"), probe);
    }

    @Override
    public byte[] transform(
            ClassLoader loader, String name, Class<?> old, ProtectionDomain domain, byte[] bytes) {
        if (isOfProgram(loader)) {
            if (first == null) {
                first = place(domain);
            }
            usesThreadLocal = usesThreadLocal || contains(bytes, THREAD_LOCAL);
        }
        return null;
    }

    @Override
    public void handle(Signal signal) {
        List<String> lines = new ArrayList<>();
        look(lines);
        drawn.forEach((name, value) -> lines.add(name + "=" + value));
        times.forEach((name, value) -> lines.add("time " + name + "=" + value));
        StringBuilder text = new StringBuilder();
        lines.stream().limit(LINES_MAX).forEach(l -> text.append("thaw-probe ").append(l).append('\n'));
        text.append("thaw-probe .\n");
        try {
            // The program may have given System.err another meaning.
            new FileOutputStream(FileDescriptor.err).write(text.toString().getBytes(StandardCharsets.UTF_8));
        } catch (IOException nobodyReads) {
            // Whoever asked gives up after a while.
        }
    }

    private void look(List<String> lines) {
        for (Class<?> found : instrumentation.getAllLoadedClasses()) {
            if (found.getName().equals("java.lang.Math$RandomNumberGeneratorHolder")) {
                lines.add("Math.random=" + Math.random());
            } else if (isOfProgram(found.getClassLoader()) && found != ThawProbe.class) {
                lookAt(found, null, found.getName());
            }
        }
        if (usesThreadLocal) {
            lines.add("ThreadLocalRandom=" + ThreadLocalRandom.current().nextLong());
        }
    }

    /** Looks at the static fields of a class, or at the fields of an object in one of them. */
    private void lookAt(Class<?> owner, Object object, String name) {
        Field[] fields;
        try {
            fields = owner.getDeclaredFields();
        } catch (Throwable missing) {
            return; // A class that a field names is not there.
        }
        for (Field field : fields) {
            if (Modifier.isStatic(field.getModifiers()) != (object == null) || field.isSynthetic()) {
                continue;
            }
            try {
                field.setAccessible(true);
                lookAt(field.get(object), owner, object == null, name + "." + field.getName());
            } catch (Throwable closed) {
                // A module does not let others look.
            }
        }
    }

    private void lookAt(Object value, Class<?> owner, boolean isStatic, String name) throws Exception {
        if (value == null) {
            return;
        }
        if (isGenerator(value)) {
            String type = value.getClass().getSimpleName();
            drawn.put(type + " in " + name, String.valueOf(next(value)));
        } else if (isKept(value)) {
            if (isOwn(owner)) {
                times.put(name, value instanceof Calendar ? "" + millis(value) : value.toString());
            }
        } else if (isStatic && isOfProgram(value.getClass().getClassLoader())) {
            lookAt(value.getClass(), value, name);
        }
    }

    private static boolean isGenerator(Object value) throws Exception {
        if (value instanceof Random || value instanceof SplittableRandom) {
            return true;
        }
        try {
            return Class.forName("java.util.random.RandomGenerator").isInstance(value);
        } catch (ClassNotFoundException before17) {
            return false;
        }
    }

    private static long next(Object generator) throws Exception {
        if (generator instanceof Random) {
            return ((Random) generator).nextLong();
        }
        if (generator instanceof SplittableRandom) {
            return ((SplittableRandom) generator).nextLong();
        }
        Class<?> type = Class.forName("java.util.random.RandomGenerator");
        return (Long) type.getMethod("nextLong").invoke(generator);
    }

    /** Whether it is a time since the program began. */
    private boolean isKept(Object value) {
        if (value instanceof LocalDate) {
            return value.equals(LocalDate.now());
        }
        long now = System.currentTimeMillis();
        if (value instanceof Long || value instanceof Integer || value instanceof AtomicLong) {
            long number = ((Number) value).longValue();
            return (number >= began && number <= now)
                    || (number >= began / 1000 && number <= now / 1000)
                    || (number / 1_000_000 >= began && number / 1_000_000 <= now);
        }
        Long millis = millis(value);
        return millis != null && millis >= began && millis <= now;
    }

    /** Milliseconds since 1970 of an object that is a time. */
    private static Long millis(Object value) {
        if (value instanceof Date) {
            return ((Date) value).getTime();
        }
        if (value instanceof Calendar) {
            return ((Calendar) value).getTimeInMillis();
        }
        if (value instanceof LocalDateTime) {
            return millis(((LocalDateTime) value).atZone(ZoneId.systemDefault()));
        }
        if (value instanceof ZonedDateTime) {
            return millis(((ZonedDateTime) value).toInstant());
        }
        if (value instanceof OffsetDateTime) {
            return millis(((OffsetDateTime) value).toInstant());
        }
        return value instanceof Instant ? ((Instant) value).toEpochMilli() : null;
    }

    /** Whether a loader is neither that of the class library nor that of its further modules. */
    private static boolean isOfProgram(ClassLoader loader) {
        return loader != null && loader != ClassLoader.getSystemClassLoader().getParent();
    }

    /** Whether a class is the author's, as far as its place says: libraries lie in other jars. */
    private boolean isOwn(Class<?> owner) {
        String place = place(owner.getProtectionDomain());
        return place != null
                && (place.equals(first) || place.endsWith("/") && !place.endsWith(".jar!/"));
    }

    private static String place(ProtectionDomain domain) {
        CodeSource source = domain == null ? null : domain.getCodeSource();
        return source == null || source.getLocation() == null ? null : source.getLocation().toString();
    }

    private static boolean contains(byte[] bytes, byte[] wanted) {
        for (int from = 0; from + wanted.length <= bytes.length; from++) {
            int same = 0;
            while (same < wanted.length && bytes[from + same] == wanted[same]) {
                same++;
            }
            if (same == wanted.length) {
                return true;
            }
        }
        return false;
    }
}
