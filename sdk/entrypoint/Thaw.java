import java.io.FileOutputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.Random;
import java.util.function.LongConsumer;

/**
 * Asks Thaw to freeze this program, and tells which copy of it this is.
 *
 * <pre>
 * Thaw.beforeFreeze(connections::close);            // what no two copies may share
 * Thaw.afterThaw(generation -&gt; connections.open());
 * loadEverything();
 * long generation = Thaw.freeze();                  // copies begin here
 * </pre>
 *
 * One file without dependencies: copy it beside your program, and put it in a
 * package of yours if you like. It talks to {@code /dev/thaw}, which every sandbox
 * has. Outside a sandbox, {@link #freeze} does nothing and returns 0, so that the
 * same program runs anywhere.
 */
public final class Thaw {
    private static final Path DEVICE = Path.of("/dev/thaw");
    private static final Deque<Runnable> BEFORE = new ArrayDeque<>();
    private static final List<LongConsumer> AFTER = new ArrayList<>();

    private static long seeded = -1;

    private Thaw() {}

    /** Calls {@code hook} before a freeze; the last one given is called first. */
    public static synchronized void beforeFreeze(Runnable hook) {
        BEFORE.push(hook);
    }

    /**
     * Calls {@code hook} with the generation when {@link #freeze} goes on, in the
     * order given: in every copy, and in the original too if it was not ended.
     */
    public static synchronized void afterThaw(LongConsumer hook) {
        AFTER.add(hook);
    }

    /**
     * Which copy this is: 0 for the original, n for a copy of the n-th generation. A
     * copy of a copy that was frozen again is of the next generation.
     */
    public static long generation() throws IOException {
        try {
            return Long.parseLong(new String(Files.readAllBytes(DEVICE)).trim());
        } catch (NoSuchFileException outside) {
            return 0;
        }
    }

    /**
     * Freezes the program here, if somebody wants that, and returns
     * {@link #generation}.
     *
     * <p>Comes back at once if nobody does ({@code thaw run}), or if this is a copy
     * already. All other threads must come to wait for something; the function says
     * {@code freeze = "program"} in {@code [entry]} of its thaw.toml if it waits for
     * clients earlier.
     */
    public static synchronized long freeze() throws IOException {
        if (!Files.exists(DEVICE)) {
            return 0;
        }
        for (Runnable hook : BEFORE) {
            hook.run();
        }
        try (FileOutputStream device = new FileOutputStream(DEVICE.toFile(), true)) {
            device.write("freeze".getBytes());
        }
        long which = generation();
        for (LongConsumer hook : AFTER) {
            hook.accept(which);
        }
        return which;
    }

    /**
     * Seeds generators of yours, and that of {@code Math.random} where Java allows it, if
     * this is another copy than at the last call; returns whether it has.
     *
     * <p>Call it where a request begins, in a program that is frozen when it first waits
     * for clients: until then all copies draw the same numbers. For {@code Math.random},
     * start Java with {@code --add-opens java.base/java.lang=ALL-UNNAMED}. Nothing seeds
     * {@code ThreadLocalRandom} anew; draw from a {@code SecureRandom} instead. Generators
     * that have no {@code setSeed}, as {@code SplittableRandom}, are to be made anew where
     * it returns true.
     */
    public static synchronized boolean reseed(Random... generators) throws IOException {
        long which = generation();
        if (which == seeded) {
            return false;
        }
        seeded = which;
        SecureRandom source = new SecureRandom();
        for (Random generator : generators) {
            generator.setSeed(source.nextLong());
        }
        seedMath(source);
        return true;
    }

    private static void seedMath(SecureRandom source) {
        try {
            Class<?> holder = Class.forName("java.lang.Math$RandomNumberGeneratorHolder");
            java.lang.reflect.Field field = holder.getDeclaredField("randomNumberGenerator");
            field.setAccessible(true);
            ((Random) field.get(null)).setSeed(source.nextLong());
        } catch (ReflectiveOperationException | RuntimeException closed) {
            // It is not opened to this class.
        }
    }
}
