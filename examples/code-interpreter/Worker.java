import java.io.BufferedInputStream;
import java.io.ByteArrayOutputStream;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.JShellException;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import sun.misc.Signal;

/**
 * Runs pieces of Java for worker.py, which describes requests and answers. Variables of the
 * environment are system properties, since a Java program cannot change its environment.
 */
class Worker {
    private static final List<String> IMPORTS = List.of(
            "java.io", "java.math", "java.net", "java.nio.file", "java.util", "java.util.concurrent",
            "java.util.function", "java.util.regex", "java.util.stream");

    private final InputStream requests;
    private final OutputStream answers;
    private final JShell shell = JShell.builder().executionEngine("local").build();
    private volatile boolean interrupted;

    Worker(String requests, String answers) throws IOException {
        this.requests = new BufferedInputStream(new FileInputStream("/dev/fd/" + requests));
        this.answers = new FileOutputStream("/dev/fd/" + answers);
    }

    public static void main(String[] descriptors) throws IOException {
        Worker worker = new Worker(descriptors[0], descriptors[1]);
        IMPORTS.forEach(name -> worker.shell.eval("import " + name + ".*;"));
        Signal.handle(new Signal("INT"), signal -> worker.interrupt());
        worker.serve();
    }

    private void serve() throws IOException {
        while (true) {
            // The length of the request.
            read();
            change(readChanges());
            List<String> before = change(readChanges());
            interrupted = false;
            execute(read());
            change(before);
            System.out.flush();
            answer("done");
        }
    }

    private void interrupt() {
        interrupted = true;
        shell.stop();
    }

    private void execute(String code) throws IOException {
        String rest = code;
        while (!rest.isBlank()) {
            var next = shell.sourceCodeAnalysis().analyzeCompletion(rest);
            String source = next.source() == null ? rest : next.source();
            rest = next.source() == null ? "" : next.remaining();
            for (SnippetEvent event : shell.eval(source)) {
                if (!succeeded(event)) {
                    return;
                }
                if (rest.isBlank()) {
                    answerValue(event);
                }
            }
        }
    }

    /** Whether the code may go on; says what is wrong otherwise. */
    private boolean succeeded(SnippetEvent event) throws IOException {
        if (interrupted) {
            answer("error", "Interrupted", "the code was interrupted", "");
            return false;
        }
        if (event.causeSnippet() == null && event.status() == Snippet.Status.REJECTED) {
            String problems = shell.diagnostics(event.snippet())
                    .map(problem -> problem.getMessage(null)).collect(Collectors.joining("\n"));
            answer("error", "CompilationError", problems, event.snippet().source() + "\n" + problems);
            return false;
        }
        if (event.exception() != null) {
            answerException(event.exception());
            return false;
        }
        return true;
    }

    private void answerException(JShellException exception) throws IOException {
        String name = exception instanceof EvalException thrown
                ? thrown.getExceptionClassName() : exception.getClass().getName();
        String value = String.valueOf(exception.getMessage());
        String calls = Stream.of(exception.getStackTrace())
                .map(call -> "\n\tat " + call).collect(Collectors.joining());
        answer("error", name, value, name + ": " + value + calls);
    }

    private void answerValue(SnippetEvent event) throws IOException {
        boolean isMain = event.causeSnippet() == null && event.snippet().kind() == Snippet.Kind.EXPRESSION
                || event.snippet().subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND;
        String value = event.value();
        if (!isMain || value == null || value.isEmpty()) {
            return;
        }
        boolean isText = value.length() > 1 && value.startsWith("\"") && value.endsWith("\"");
        answer("result", isText ? value.substring(1, value.length() - 1) : value);
    }

    /** Applies changes of variables; those that undo them. */
    private static List<String> change(List<String> changes) {
        List<String> undo = new ArrayList<>();
        for (String change : changes) {
            String[] parts = change.split("=", 2);
            String before = parts.length == 2
                    ? System.setProperty(parts[0], parts[1]) : System.clearProperty(parts[0]);
            undo.add(before == null ? parts[0] : parts[0] + "=" + before);
        }
        return undo;
    }

    private List<String> readChanges() throws IOException {
        List<String> changes = new ArrayList<>();
        for (int count = Integer.parseInt(read()); count > 0; count--) {
            changes.add(read());
        }
        return changes;
    }

    private String read() throws IOException {
        ByteArrayOutputStream field = new ByteArrayOutputStream();
        int next = requests.read();
        for (; next > 0; next = requests.read()) {
            field.write(next);
        }
        if (next < 0) {
            // Nobody asks any more.
            System.exit(0);
        }
        return field.toString(StandardCharsets.UTF_8);
    }

    private void answer(String... fields) throws IOException {
        for (String field : fields) {
            answers.write((field.replace("\0", "") + "\0").getBytes(StandardCharsets.UTF_8));
        }
        answers.flush();
    }
}
