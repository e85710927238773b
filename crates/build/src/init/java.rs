//! Java: Maven's `pom.xml`, Gradle's build files, or classes that lie beside each other.

use super::gradle;
use super::look::Look;
use super::{InitError, Project};
use roxmltree::{Document, Node};

/// Maven's central repository.
const CENTRAL: [&str; 1] = ["repo.maven.apache.org:443"];
/// Directories of sources that are searched for `main`.
const DIRECTORIES_MAX: usize = 256;

/// A class with a `main` beside a directory's other files.
pub(super) fn main_file(look: &Look) -> Option<String> {
    let sources = look.sources(".java");
    let found = sources.iter().find(|(_, text)| text.contains("static void main("));
    found.map(|(name, _)| name.clone())
}

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    project.kind = "java";
    project.names_interpreter("java");
    project.limits.push(("memory", "\"512MiB\"".to_owned()));
    let is_of_gradle =
        || gradle::BUILD_FILES.iter().chain(&gradle::SETTINGS_FILES).any(|name| look.has(name));
    match look.text("pom.xml")? {
        Some(pom) => maven(look, &pom, project),
        None if is_of_gradle() => gradle::read(look, project),
        None => plain(look, project),
    }
}

fn plain(look: &Look, project: &mut Project) -> Result<(), InitError> {
    let Some(file) = main_file(look) else {
        return Err(look.unusable("", "no class in it has a `static void main`"));
    };
    project.found.push(file.clone());
    let class = file.trim_end_matches(".java").to_owned();
    project.listens_as(&look.sources(".java"));
    project.command(&["java", "-cp", "/app", &class]);
    project.file("build", "/app");
    project.builds("Compiles the classes.", &["sh", "-c", "javac -d build *.java"], &[]);
    Ok(())
}

/// What a pom.xml says.
struct Pom {
    artifact: String,
    version: String,
    final_name: Option<String>,
    /// Where Maven puts what it makes.
    target: String,
    main_class: Option<String>,
    is_boot: bool,
    is_shaded: bool,
}

fn maven(look: &Look, text: &str, project: &mut Project) -> Result<(), InitError> {
    let pom = Pom::parse(text).map_err(|reason| look.unusable("pom.xml", &reason))?;
    project.found.push("pom.xml".to_owned());
    let name = pom.final_name.clone();
    let name = name.unwrap_or_else(|| format!("{}-{}", pom.artifact, pom.version));
    if name.contains("${") {
        return Err(look.unusable("pom.xml", &format!(
            "the name of its archive, {name}, is made of properties; set <finalName> in <build> to a plain name"
        )));
    }
    let target = &pom.target;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "./_-".contains(c);
    if !target.chars().all(is_plain) {
        return Err(look.unusable(
            "pom.xml",
            &format!(
                "its <directory>, {target}, is no plain path; set <directory> in <build> to one"
            ),
        ));
    }
    let resources = "src/main/resources/application.properties";
    let settings = look.source(resources).map(|text| (resources.to_owned(), text));
    project.file(&format!("{target}/{name}.jar"), "/app/app.jar");
    let (lib, output) = (format!("{target}/lib"), format!("-DoutputDirectory={target}/lib"));
    let mut command = vec!["mvn", "--batch-mode", "--quiet", "-DskipTests", "package"];
    if pom.is_boot {
        project.found.push("Spring Boot".to_owned());
        project.listens_as(settings.as_slice());
        let port = format!("--server.port={}", project.port);
        project.command(&["java", "-jar", "/app/app.jar", &port]);
        project.limits[0].1 = "\"768MiB\"".to_owned();
    } else if pom.is_shaded {
        project.found.push("an archive with all dependencies".to_owned());
        project.command(&["java", "-jar", "/app/app.jar"]);
    } else {
        let named = pom.main_class.clone().filter(|class| !class.contains("${"));
        let (main, sources) = main_class(look, "src/main/java", named);
        let main = main.ok_or_else(|| {
            look.unusable(
                "pom.xml",
                "it names no mainClass, and no class below src/main/java has a `static void main`",
            )
        })?;
        project.found.push(main.clone());
        project.listens_as(&sources);
        project.file(&lib, "/app/lib");
        project.command(&["java", "-cp", "/app/app.jar:/app/lib/*", &main]);
        command.extend(["dependency:copy-dependencies", "-DincludeScope=runtime"]);
        command.push(&output);
    }
    // Without dependencies there is nothing to copy, and no directory.
    if project.files.len() == 2 {
        let line = format!("mkdir -p {lib} && {}", command.join(" "));
        project.builds("Compiles with Maven.", &["sh", "-c", &line], &CENTRAL);
    } else {
        project.builds("Compiles with Maven.", &command, &CENTRAL);
    }
    Ok(())
}

impl Pom {
    fn parse(text: &str) -> Result<Self, String> {
        let document = Document::parse(text).map_err(|error| error.to_string())?;
        let root = document.root_element();
        let own = |name: &str| child(root, name);
        let parent = root.children().find(|node| node.has_tag_name_of("parent"));
        let version = own("version").or_else(|| child(parent?, "version"));
        if own("packaging").is_some_and(|packaging| packaging != "jar") {
            return Err("its packaging is not `jar`; go to the module that serves".to_owned());
        }
        let plugins: Vec<String> = root
            .descendants()
            .filter(|node| node.has_tag_name_of("plugin"))
            .filter_map(|plugin| child(plugin, "artifactId"))
            .collect();
        let has = |name: &str| plugins.iter().any(|plugin| plugin == name);
        let build = root.children().find(|node| node.has_tag_name_of("build"));
        let main = root.descendants().find(|node| {
            ["mainClass", "exec.mainClass", "main.class", "start-class"]
                .contains(&node.tag_name().name())
        });
        Ok(Self {
            artifact: own("artifactId").ok_or("it has no <artifactId>")?,
            version: version.ok_or("it has no <version>")?,
            target: build
                .and_then(|build| child(build, "directory"))
                .map(|path| {
                    path.trim_start_matches("${project.basedir}/").trim_matches('/').to_owned()
                })
                .filter(|path| !path.is_empty())
                .unwrap_or_else(|| "target".to_owned()),
            final_name: build.and_then(|build| child(build, "finalName")),
            main_class: main.and_then(|node| node.text()).map(|text| text.trim().to_owned()),
            is_boot: has("spring-boot-maven-plugin"),
            is_shaded: has("maven-shade-plugin"),
        })
    }
}

/// Elements of any namespace: a pom.xml may have Maven's or none.
trait Named {
    fn has_tag_name_of(&self, name: &str) -> bool;
}

impl Named for Node<'_, '_> {
    fn has_tag_name_of(&self, name: &str) -> bool {
        self.is_element() && self.tag_name().name() == name
    }
}

/// The text of an element directly below another.
fn child(node: Node<'_, '_>, name: &str) -> Option<String> {
    let found = node.children().find(|child| child.has_tag_name_of(name))?;
    Some(found.text()?.trim().to_owned())
}

/// The class with `main`: the one that is named, or the first in the sources below a directory, and
/// the sources.
pub(super) fn main_class(
    look: &Look,
    below: &str,
    named: Option<String>,
) -> (Option<String>, Vec<(String, String)>) {
    let mut sources = Vec::new();
    let mut main = named;
    let mut directories = vec![below.to_owned()];
    let mut seen = 0;
    while let Some(directory) = directories.pop() {
        seen += 1;
        if seen > DIRECTORIES_MAX {
            break;
        }
        let Ok(there) = Look::at(&look.directory().join(&directory)) else { continue };
        for (name, text) in there.sources(".java") {
            if text.contains("static void main(") && main.is_none() {
                let path = format!("{directory}/{}", name.trim_end_matches(".java"));
                main = Some(path[below.len() + 1..].replace('/', "."));
            }
            sources.push((format!("{directory}/{name}"), text));
        }
        directories
            .extend(look.directories(&directory).into_iter().map(|n| format!("{directory}/{n}")));
    }
    (main, sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pom_is_read_with_its_parent() {
        let text = r#"<project xmlns="http://maven.apache.org/POM/4.0.0"><parent>
            <artifactId>starter</artifactId><version>3.1</version></parent>
            <artifactId>shop</artifactId>
            <build><finalName>app</finalName><plugins><plugin>
            <artifactId>spring-boot-maven-plugin</artifactId></plugin></plugins></build></project>"#;
        let pom = Pom::parse(text).unwrap();
        assert_eq!((pom.artifact.as_str(), pom.version.as_str()), ("shop", "3.1"));
        assert_eq!(pom.final_name.as_deref(), Some("app"));
        assert!(pom.is_boot && !pom.is_shaded);
        assert_eq!(pom.target, "target");
        for directory in ["build", "${project.basedir}/build"] {
            let text = format!(
                "<project><artifactId>a</artifactId><version>1</version>\
                 <build><directory>{directory}</directory></build></project>"
            );
            assert_eq!(Pom::parse(&text).unwrap().target, "build");
        }
    }

    #[test]
    fn what_is_no_pom_is_said() {
        for (text, expected) in [
            ("<project>", "never closed"),
            ("<project><artifactId>a</artifactId></project>", "no <version>"),
            ("<project><packaging>pom</packaging></project>", "packaging"),
        ] {
            let error = Pom::parse(text).err().unwrap();
            assert!(error.contains(expected), "{error}");
        }
    }
}
