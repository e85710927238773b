import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.concurrent.TimeUnit;

/** Child processes: their streams and their ends. */
public class Processes {
    static String output(Process process) throws Exception {
        try (var reader = new BufferedReader(new InputStreamReader(process.getInputStream()))) {
            StringBuilder text = new StringBuilder();
            for (String line; (line = reader.readLine()) != null; ) {
                text.append(line).append('|');
            }
            return text + " " + process.waitFor();
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.out.println(output(new ProcessBuilder("echo", "from Java").start()));
        var builder = new ProcessBuilder("sh", "-c", "echo out; echo err >&2; exit 5").redirectErrorStream(true);
        System.out.println(output(builder.start()));
        Process sort = new ProcessBuilder("sort", "-r").start();
        try (var writer = sort.outputWriter()) {
            writer.write("a\nc\nb\n");
        }
        System.out.println(output(sort));
        Process sleep = new ProcessBuilder("sleep", "30").start();
        System.out.println("in time " + sleep.waitFor(50, TimeUnit.MILLISECONDS));
        sleep.destroyForcibly();
        System.out.println("killed " + sleep.waitFor());
        System.out.println("alive " + sleep.isAlive() + ", " + ProcessHandle.current().children().count() + " children");
        System.out.println(ProcessBuilder.startPipeline(java.util.List.of(
                new ProcessBuilder("seq", "1", "1000"), new ProcessBuilder("wc", "-l"))).get(1).waitFor());
        try {
            new ProcessBuilder("/no/such/program").start();
        } catch (java.io.IOException e) {
            System.out.println(e.getMessage());
        }
    }
}
