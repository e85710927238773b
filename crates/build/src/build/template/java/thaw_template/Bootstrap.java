// Turns Java into a runtime template, and its copies into programs.
//
// The virtual machine makes an object of this class as its system class loader, when it is up and before its
// launcher looks at the program. That is where the template is frozen. In a copy, the launcher finds the
// main class and the arguments in its C memory, where this class has written them, and the environment
// likewise. It then runs the program as if it had been started with it: nothing of this file is below it.
// `docs/decisions/0079-templates-of-java.md` says why it is done so.

package thaw_template;

import java.io.File;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles.Lookup;
import java.lang.invoke.MethodType;
import java.lang.management.GarbageCollectorMXBean;
import java.lang.reflect.Field;
import java.nio.charset.Charset;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.jar.JarFile;
import sun.misc.Unsafe;

public final class Bootstrap extends ClassLoader {
    /** The option that has the virtual machine load this class. */
    private static final String LOADER = "java.system.class.loader";
    /** How variables begin that make room for those of programs. */
    private static final String ROOM = "THAW_TEMPLATE_";
    /** Options with a value as a word of its own (java(1)). */
    private static final List<String> WITH_VALUE = List.of(
            "--add-modules", "--add-exports", "--add-opens", "--add-reads", "--enable-native-access");
    private static final List<String> CLASS_PATH = List.of("-cp", "-classpath", "--class-path");
    /** Classes that servers usually need; none of them is initialized. */
    private static final List<String> USUAL_CLASSES = List.of(
            "com.sun.net.httpserver.HttpServer",
            "java.lang.management.ManagementFactory",
            "java.math.BigDecimal",
            "java.net.HttpURLConnection",
            "java.net.InetSocketAddress",
            "java.net.ServerSocket",
            "java.net.URI",
            "java.net.http.HttpClient",
            "java.nio.channels.ServerSocketChannel",
            "java.nio.file.Files",
            "java.security.MessageDigest",
            "java.text.SimpleDateFormat",
            "java.time.ZonedDateTime",
            "java.time.format.DateTimeFormatter",
            "java.util.Base64",
            "java.util.Properties",
            "java.util.Scanner",
            "java.util.UUID",
            "java.util.concurrent.CompletableFuture",
            "java.util.concurrent.ConcurrentHashMap",
            "java.util.concurrent.ThreadPoolExecutor",
            "java.util.jar.JarFile",
            "java.util.logging.Logger",
            "java.util.regex.Pattern",
            "java.util.stream.Collectors",
            "java.util.zip.GZIPInputStream",
            "javax.net.ssl.SSLContext",
            "sun.launcher.LauncherHelper",
            "sun.nio.ch.ServerSocketChannelImpl",
            "sun.net.httpserver.ServerImpl");

    private final Unsafe memory;
    /** May look at everything. */
    private final Lookup everything;
    /** The system class loader that the program is to have, and what sets it. */
    private final ClassLoader own;
    private final MethodHandle systemClassLoader;

    public Bootstrap(ClassLoader own) throws Throwable {
        super(own);
        this.own = own;
        Field unsafe = Unsafe.class.getDeclaredField("theUnsafe");
        unsafe.setAccessible(true);
        memory = (Unsafe) unsafe.get(null);
        Field lookup = Lookup.class.getDeclaredField("IMPL_LOOKUP");
        everything = (Lookup) memory.getObject(memory.staticFieldBase(lookup), memory.staticFieldOffset(lookup));
        systemClassLoader = everything.findStaticSetter(ClassLoader.class, "scl", ClassLoader.class);

        if (Runtime.version().feature() < 17) {
            throw new UnsupportedOperationException("templates need OpenJDK 17 or later");
        }
        Words words = new Words();
        Environment environment = new Environment();
        Fields fields = new Fields();
        Launcher launcher = new Launcher();
        loadUsualClasses();
        hideOptions();
        collectGarbage();
        removeFiles();
        freeze();
        fields.enterDirectory(new File("/proc/self/cwd").getCanonicalPath());
        environment.take();
        Program program = new Program(read("/proc/self/cmdline"));
        System.setProperty("sun.java.command", program.command());
        takeClassPath(program.classPath, fields);
        words.replaceBy(program.mainClass(launcher), program.arguments);
    }

    /** The launcher asks for the main class: from then on the program has its own loader. */
    @Override
    protected Class<?> loadClass(String name, boolean resolve) throws ClassNotFoundException {
        try {
            systemClassLoader.invoke(own);
        } catch (Throwable error) {
            throw new ClassNotFoundException("the system class loader cannot be set", error);
        }
        if (Thread.currentThread().getContextClassLoader() == this) {
            Thread.currentThread().setContextClassLoader(own);
        }
        return own.loadClass(name);
    }

    /** The virtual machine keeps this loader, and asks it to add agents to the class path (java.lang.instrument). */
    @SuppressWarnings("unused")
    private void appendToClassPathForInstrumentation(String path) throws Throwable {
        MethodType type = MethodType.methodType(void.class, String.class);
        everything.findVirtual(own.getClass(), "appendToClassPathForInstrumentation", type).invoke(own, path);
    }

    /** Removes this class and those within it, which are in a directory of the class path. */
    private static void removeFiles() throws IOException, ClassNotFoundException {
        // It is needed when there is no file of it any more.
        Class.forName("thaw_template.Bootstrap$Program");
        File directory = new File(System.getProperty("java.class.path"), "thaw_template");
        for (File file : directory.listFiles()) {
            file.delete();
        }
        if (!directory.delete()) {
            throw new IOException("the bootstrap cannot be removed");
        }
    }

    private void loadUsualClasses() {
        for (String name : USUAL_CLASSES) {
            try {
                Class.forName(name, false, own);
            } catch (ClassNotFoundException | LinkageError absent) {
                // A runtime may be without the module.
            }
        }
    }

    /** Takes this class out of the options and properties that programs can ask for. */
    private void hideOptions() throws Throwable {
        System.getProperties().remove(LOADER);
        changeSaved(LOADER, null);
        try {
            Class<?> factory = Class.forName("sun.management.ManagementFactoryHelper");
            Class<?> management = Class.forName("sun.management.VMManagementImpl");
            Class<?> type = Class.forName("sun.management.VMManagement");
            Object machine = everything.findStaticGetter(factory, "jvm", type).invoke();
            String[] options = (String[]) everything.findVirtual(
                    management, "getVmArguments0", MethodType.methodType(String[].class)).invoke(machine);
            List<String> given = new ArrayList<>(Arrays.asList(options));
            given.remove("-D" + LOADER + "=" + getClass().getName());
            everything.findSetter(management, "vmArgs", List.class)
                    .invoke(machine, Collections.unmodifiableList(given));
        } catch (ClassNotFoundException absent) {
            // Then nobody can ask.
        }
    }

    /** Changes a property among those that the class library keeps for itself. */
    private void changeSaved(String name, String value) throws Throwable {
        Class<?> machine = Class.forName("jdk.internal.misc.VM");
        Map<?, ?> saved = (Map<?, ?>) everything.findStaticGetter(machine, "savedProps", Map.class).invoke();
        Map<Object, Object> changed = new HashMap<>(saved);
        if (value == null) {
            changed.remove(name);
        } else {
            changed.put(name, value);
        }
        everything.findStaticSetter(machine, "savedProps", Map.class)
                .invoke((Map<?, ?>) Collections.unmodifiableMap(changed));
    }

    /** Throws away what nobody refers to, where the heap stays about as large. */
    private void collectGarbage() throws Throwable {
        try {
            Class<?> factory = Class.forName("sun.management.ManagementFactoryHelper");
            List<?> collectors = (List<?>) everything.findStatic(
                    factory, "getGarbageCollectorMXBeans", MethodType.methodType(List.class)).invoke();
            for (Object collector : collectors) {
                String name = ((GarbageCollectorMXBean) collector).getName();
                if (name.equals("MarkSweepCompact") || name.equals("PS MarkSweep")) {
                    System.gc();
                }
            }
        } catch (ClassNotFoundException absent) {
            // Nobody says which collector it is.
        }
    }

    private static void freeze() throws IOException {
        try (FileOutputStream device = new FileOutputStream("/dev/thaw")) {
            device.write("template".getBytes(StandardCharsets.US_ASCII));
        }
    }

    private void takeClassPath(String path, Fields fields) throws Throwable {
        System.setProperty("java.class.path", path);
        changeSaved("java.class.path", path);
        fields.takeClassPath(path);
    }

    /** The strings of a file with a NUL behind each. */
    private static List<byte[]> read(String file) throws IOException {
        byte[] bytes;
        try (FileInputStream in = new FileInputStream(file)) {
            bytes = in.readAllBytes();
        }
        List<byte[]> strings = new ArrayList<>();
        for (int from = 0, at = 0; at < bytes.length; at++) {
            if (bytes[at] == 0) {
                strings.add(Arrays.copyOfRange(bytes, from, at));
                from = at + 1;
            }
        }
        return strings;
    }

    /** The encoding of arguments and names of files. */
    private static Charset encoding() {
        return Charset.forName(System.getProperty("sun.jnu.encoding"));
    }

    /** Where a mapping of this name lies. */
    private static long[] mapping(String name) throws IOException {
        byte[] maps;
        try (FileInputStream in = new FileInputStream("/proc/self/maps")) {
            maps = in.readAllBytes();
        }
        for (String line : new String(maps, StandardCharsets.ISO_8859_1).split("\n")) {
            if (line.endsWith(name)) {
                String[] ends = line.substring(0, line.indexOf(' ')).split("-");
                return new long[] {Long.parseUnsignedLong(ends[0], 16), Long.parseUnsignedLong(ends[1], 16)};
            }
        }
        throw new IOException("there is no " + name);
    }

    private boolean holds(long address, byte[] bytes) {
        for (int at = 0; at < bytes.length; at++) {
            if (memory.getByte(address + at) != bytes[at]) {
                return false;
            }
        }
        return true;
    }

    private void write(long address, byte[] bytes) {
        for (int at = 0; at < bytes.length; at++) {
            memory.putByte(address + at, bytes[at]);
        }
        memory.putByte(address + bytes.length, (byte) 0);
    }

    /** The words of the command line from the main class on, as the launcher has copied them. */
    private final class Words {
        /** The placeholders, each with a NUL behind it, and where malloc(3) has put them. */
        private final List<byte[]> placeholders = new ArrayList<>();
        private final List<Long> places = new ArrayList<>();

        Words() throws IOException {
            long[] heap = mapping("[heap]");
            for (String word : System.getProperty("sun.java.command").split(" ")) {
                byte[] bytes = word.getBytes(StandardCharsets.US_ASCII);
                byte[] string = Arrays.copyOf(bytes, bytes.length + 1);
                placeholders.add(string);
                places.add(find(heap, string));
            }
        }

        private long find(long[] heap, byte[] string) throws IOException {
            long found = 0;
            for (long at = heap[0]; at <= heap[1] - string.length; at += 16) {
                if (memory.getByte(at) == string[0] && holds(at, string)) {
                    if (found != 0) {
                        throw new IOException("the launcher has its arguments in several places");
                    }
                    found = at;
                }
            }
            if (found == 0) {
                throw new IOException("the launcher's arguments are not where they are known to be");
            }
            return found;
        }

        void replaceBy(String mainClass, List<byte[]> arguments) throws IOException {
            List<byte[]> words = new ArrayList<>(arguments);
            words.add(0, mainClass.getBytes(encoding()));
            if (words.size() != places.size()) {
                throw new IOException("the program has another number of arguments than its template");
            }
            for (int word = 0; word < words.size(); word++) {
                byte[] placeholder = placeholders.get(word);
                if (words.get(word).length >= placeholder.length) {
                    throw new IOException("an argument is longer than its template has room for");
                }
                if (!holds(places.get(word), placeholder)) {
                    throw new IOException("the launcher has its arguments elsewhere by now");
                }
                write(places.get(word), words.get(word));
            }
        }
    }

    /** The environment in C, environ(7), where the kernel has put it. */
    private final class Environment {
        /** The address of the first pointer, and how many there are. */
        private final long pointers;
        private final int count;
        /** The strings. */
        private final long from;
        private final long to;

        Environment() throws IOException {
            long[] stack = mapping("[stack]");
            long string = findBackwards(stack, ROOM.getBytes(StandardCharsets.US_ASCII));
            long pointer = string & -8;
            while (memory.getAddress(pointer) != string) {
                pointer -= 8;
                if (pointer < stack[0]) {
                    throw new IOException("the environment is not where it is known to be");
                }
            }
            while (memory.getAddress(pointer - 8) != 0) {
                pointer -= 8;
            }
            pointers = pointer;
            int number = 0;
            long least = Long.MAX_VALUE;
            long most = 0;
            for (; memory.getAddress(pointer) != 0; pointer += 8, number++) {
                least = Math.min(least, memory.getAddress(pointer));
                most = Math.max(most, memory.getAddress(pointer));
            }
            while (memory.getByte(most) != 0) {
                most++;
            }
            count = number;
            from = least;
            to = most + 1;
        }

        private long findBackwards(long[] range, byte[] string) throws IOException {
            for (long at = range[1] - string.length; at >= range[0]; at--) {
                if (memory.getByte(at) == string[0] && holds(at, string)) {
                    return at;
                }
            }
            throw new IOException("the environment is not on the stack");
        }

        /** Takes over what the kernel says. */
        void take() throws IOException {
            List<byte[]> variables = read("/proc/self/environ");
            long at = from;
            if (variables.size() > count) {
                throw new IOException("there are more variables than the template has room for");
            }
            for (int number = 0; number < variables.size(); number++) {
                byte[] variable = variables.get(number);
                if (variable.length >= to - at) {
                    throw new IOException("the variables are longer than the template has room for");
                }
                write(at, variable);
                memory.putAddress(pointers + 8L * number, at);
                at += variable.length + 1;
            }
            memory.setMemory(at, to - at, (byte) 0);
            memory.setMemory(pointers + 8L * variables.size(), 8L * (count - variables.size()), (byte) 0);
            if (System.getenv().size() != variables.size()) {
                throw new IOException("the C library has its environment elsewhere");
            }
        }
    }

    /** Places in objects that the class library has made when it started. */
    private final class Fields {
        private final Field classPath;
        private final MethodHandle newClassPath;
        private final Object paths;
        private final Field pathsDirectory;
        private final Object files;
        private final Field filesDirectory;
        private final Field directory;

        Fields() throws ReflectiveOperationException {
            Class<?> loader = Class.forName("jdk.internal.loader.BuiltinClassLoader");
            if (!loader.isInstance(own)) {
                throw new ClassCastException("the class loader of programs is none of the known ones");
            }
            classPath = loader.getDeclaredField("ucp");
            newClassPath = everything.findConstructor(Class.forName("jdk.internal.loader.URLClassPath"),
                    MethodType.methodType(void.class, String.class, boolean.class));
            directory = Class.forName("jdk.internal.util.StaticProperty").getDeclaredField("USER_DIR");
            paths = java.nio.file.FileSystems.getDefault();
            pathsDirectory = Class.forName("sun.nio.fs.UnixFileSystem").getDeclaredField("defaultDirectory");
            files = filesOf();
            filesDirectory = files.getClass().getDeclaredField("userDir");
        }

        /** What java.io.File asks. */
        private Object filesOf() throws ReflectiveOperationException {
            for (Field field : File.class.getDeclaredFields()) {
                if (field.getType().getName().equals("java.io.FileSystem")) {
                    return memory.getObject(memory.staticFieldBase(field), memory.staticFieldOffset(field));
                }
            }
            throw new NoSuchFieldException("the file system of java.io.File");
        }

        private void put(Object object, Field field, Object value) {
            memory.putObject(object, memory.objectFieldOffset(field), value);
        }

        void enterDirectory(String path) throws Throwable {
            System.setProperty("user.dir", path);
            changeSaved("user.dir", path);
            memory.putObject(memory.staticFieldBase(directory), memory.staticFieldOffset(directory), path);
            put(paths, pathsDirectory, path.getBytes(encoding()));
            put(files, filesDirectory, path);
        }

        /** Nothing was compiled yet that takes the one before for a constant. */
        void takeClassPath(String path) throws Throwable {
            put(own, classPath, newClassPath.invoke(path, false));
        }
    }

    /** A program, by the command line that it would have been started with. */
    private final class Program {
        final String classPath;
        /** The archive, or the main class. */
        private final String subject;
        private final boolean isArchive;
        final List<byte[]> arguments;

        Program(List<byte[]> commandLine) {
            List<String> words = new ArrayList<>();
            for (byte[] word : commandLine) {
                words.add(new String(word, encoding()));
            }
            String path = System.getenv("CLASSPATH");
            boolean hasArchive = false;
            int at = 1;
            for (; words.get(at).startsWith("-"); at++) {
                String word = words.get(at);
                if (word.equals("-jar")) {
                    hasArchive = true;
                } else if (CLASS_PATH.contains(word)) {
                    path = words.get(++at);
                } else if (word.startsWith("--class-path=")) {
                    path = word.substring(word.indexOf('=') + 1);
                } else if (WITH_VALUE.contains(word)) {
                    at++;
                }
            }
            isArchive = hasArchive;
            subject = words.get(at);
            classPath = isArchive ? subject : expanded(path == null ? "." : path);
            arguments = commandLine.subList(at + 1, commandLine.size());
        }

        /** Puts archives in the place of `directory/*`, as the launcher does. */
        private String expanded(String path) {
            List<String> elements = new ArrayList<>();
            for (String element : path.split(":", -1)) {
                int before = elements.size();
                for (String name : archivesOf(element)) {
                    elements.add(element.substring(0, element.length() - 1) + name);
                }
                if (elements.size() == before) {
                    elements.add(element);
                }
            }
            return String.join(":", elements);
        }

        /** The archives that `directory/*` stands for, in the order of the directory. */
        private List<String> archivesOf(String element) {
            List<String> found = new ArrayList<>();
            boolean isWildcard = element.equals("*") || element.endsWith("/*");
            if (!isWildcard || new File(element).exists()) {
                return found;
            }
            String[] all = new File(element.length() == 1 ? "." : element.substring(0, element.length() - 1)).list();
            for (String name : all == null ? new String[0] : all) {
                if ((name.endsWith(".jar") || name.endsWith(".JAR")) && !name.contains(":")) {
                    found.add(name);
                }
            }
            return found;
        }

        /** As the launcher shows it. */
        String command() {
            StringBuilder command = new StringBuilder(subject);
            for (byte[] argument : arguments) {
                command.append(' ').append(new String(argument, encoding()));
            }
            return command.toString();
        }

        String mainClass(Launcher launcher) throws Throwable {
            return isArchive ? launcher.mainClassOf(subject) : subject;
        }
    }

    /** The part of the launcher that is in Java. */
    private final class Launcher {
        private final MethodHandle initOutput;
        private final MethodHandle mainClass;

        Launcher() throws ReflectiveOperationException {
            Class<?> helper = Class.forName("sun.launcher.LauncherHelper");
            initOutput = everything.findStatic(helper, "initOutput", MethodType.methodType(void.class, boolean.class));
            mainClass = mainClass(helper);
        }

        /** Takes the archive by its name, or, in later versions, open. */
        private MethodHandle mainClass(Class<?> helper) throws ReflectiveOperationException {
            String name = "getMainClassFromJar";
            try {
                return everything.findStatic(helper, name, MethodType.methodType(String.class, String.class));
            } catch (NoSuchMethodException later) {
                return everything.findStatic(helper, name, MethodType.methodType(String.class, JarFile.class));
            }
        }

        String mainClassOf(String archive) throws Throwable {
            initOutput.invoke(true);
            if (mainClass.type().parameterType(0) == String.class) {
                return (String) mainClass.invoke(archive);
            }
            try (JarFile open = new JarFile(archive)) {
                return (String) mainClass.invoke(open);
            }
        }
    }
}
